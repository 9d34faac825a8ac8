"""How many samples a micro-batch has, where the config leaves that open: as many as fit a rank's memory.

Invariant: the same config on machines of the same memory gives the same number, on every rank, whatever else
their memory is used for: a run that goes on has the micro-batches that it had.
Communication: `agreed` exchanges what ranks have, and rank 0's answer.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from polyreme.config.schema import is_files, tiers_of
from polyreme.config.validate import divisors
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.files.machine import boot
from polyreme.layout.mesh_axes import lines
from polyreme.models.huggingface import tensors_in
from polyreme.offload import host
from polyreme.pipeline.profile import copy_to
from polyreme.pipeline.schedule import build, peak_activations, stage_ranks
from polyreme.placement.memory_model import working_set
from polyreme.step.batch.batches import MicroBatch
from polyreme.step.loss.objective import Objective
from polyreme.step.memory.dry_run import RunSettings, place
from polyreme.step.memory.kept import Kept, device_of_ranks, kept_by

USED = 0.85
"""What of a rank's memory is planned with: operators, the allocator and libraries have the rest."""
AT_MOST = 32
"""Bytes for each number of a model that no rank exceeds, with AdamW in any precision but fp64."""
WIDE = 256
"""Bytes that no model of ours keeps for each output of a layer and each number of the batch: 16 copies of
both sides of each matrix, and attention over 20,000 tokens."""
GIB = 1 << 30
META = torch.device("meta")
KNOWN = {"torch", "transformers", "peft"}
"""Packages whose forwards may be called without numbers."""


@dataclass(frozen=True)
class Fit:
    """micro: the most samples of a micro-batch that fit; None: as many as the rule without memory says.
    reason: why. fits: whether anything does, as far as is known."""

    micro: int | None
    reason: str
    fits: bool = True


UNKNOWN = Fit(None, "what fits is not known")


def own_memory() -> int:
    """Bytes of the memory that this rank computes in: its device's, or the host's, which ranks there
    share."""
    device = device_of_ranks()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host.total()


def agreed(ranks: Axis | Mesh, find: Callable[[int], Fit]) -> tuple[int | None, str]:
    """How many samples of a micro-batch fit, by what rank 0 finds for the least memory of a rank, and why;
    None for as many as the rule without memory says. All ranks must call."""
    told = ranks.gather_objects([f"{socket.gethostname()} {boot()}", own_memory()])
    shared = Counter(name for name, _ in told) if device_of_ranks().type == "cpu" else Counter()
    memory = min(size // max(shared[name], 1) for name, size in told)
    found = find(memory) if ranks.rank == 0 else Fit(None, "")
    micro, reason = ranks.gather_objects([found.micro, found.reason])[0]
    return micro, reason


def derived(micro: int, reason: str) -> str:
    """What there is to say of micro-batches of so many samples, where these are fewer than without memory."""
    return f"batch.micro = {micro} is derived: {reason}"


Make = Callable[[], nn.Module | None]
Look = Callable[[nn.Module], Kept | str]
Refit = Callable[[int], RunSettings]
"""Settings with micro-batches of at most so many samples. Raises ConfigError where a step cannot have
several."""


def fit(run: RunSettings, refit: Refit, memory: int, make: Make, look: Look) -> Fit:
    """How many samples fit into `memory` bytes a rank, at most as many as a micro-batch of `run` has.

    make: makes the model, on the meta device, where it is known; look: what a micro-batch of as many samples
    as that has keeps of one, which it may change."""
    try:
        return _fit(run, refit, int(memory * USED), memory, make, look)
    except Exception as error:  # other ranks wait; what is wrong is raised again where it belongs to
        lines = str(error).splitlines() or [type(error).__name__]
        return Fit(None, f"what fits is not known: {lines[min(1, len(lines) - 1)].strip(' -')}")


def _fit(run: RunSettings, refit: Refit, room: int, memory: int, make: Make, look: Look) -> Fit:
    most, of = run.micro, f"of {memory / GIB:.3g} GiB"
    model = make()
    if model is None:
        return Fit(None, f"{UNKNOWN.reason}, as the model is not")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    found = look(model)
    if isinstance(found, str):
        return Fit(None, f"what fits is not known: {found}")
    own = _activations(run, found, 1.0)
    if numbers * AT_MOST + own <= room:  # nothing more has to be known of a small model
        return Fit(None, f"all fits: {_samples(most)} {own / GIB:.3g} GiB {of}")
    states: dict[bool, int] = {}
    needed = 0
    for micro in sorted(n for n in divisors(run.share) if n <= most)[::-1]:
        tried = run if micro == most else refit(micro)
        several = tried.microbatches > 1
        if several not in states:
            states[several] = _states(tried, make)
        own = _activations(tried, found, micro / most)
        needed = states[several] + own
        if needed <= room:
            told = f"{_samples(micro)} {own / GIB:.3g} GiB, beside {states[several] / GIB:.3g} {of}"
            return Fit(None if micro == most else micro, told)
    return Fit(1, f"not even one sample fits: {needed / GIB:.3g} GiB are needed {of}", fits=False)


def _samples(number: int) -> str:
    return "1 sample keeps" if number == 1 else f"{number} samples keep"


def _states(run: RunSettings, make: Make) -> int:
    """The most bytes that a rank has of the model and takes for a step, beside activations: of the first
    stage's rank and the last one's."""
    line = lines(run.axes, run.order, "pp")[0]
    found = []
    for rank in {line[0], line[-1]}:
        model = make()
        assert model is not None
        placed = place(model, run, rank)
        works = working_set(placed.placement, run.placement.zero.prefetch)
        near = placed.placement.device.type == "cpu"  # where tiers are in the same memory
        counted = works["parameters"] + works["gradients"] + works["states"] + near * works["tiers"]
        found.append(counted + placed.updates.nbytes + placed.memory["buffers"])
    return max(found)


def _activations(run: RunSettings, whole: Kept, share: float) -> int:
    """The most bytes that a rank keeps for backwards, of a `share` of the samples of which a model that is
    not divided keeps `whole`.

    Over tensor parallelism what is outside its layers stays whole: 10 of 34 parts of a block (Korthikanti et
    al., 2022, arXiv:2205.05198, section 4.1)."""
    tp, pp = run.axes["tp"], run.axes["pp"]
    part = 1 / tp if run.placement.sequence_parallel else (10 + 24 / tp) / 34
    if pp > 1:
        stages = len(stage_ranks(run.schedule, pp, run.virtual))
        table = build(run.schedule, pp, run.microbatches, run.virtual)
        part *= max(peak_activations(row) for row in table) / stages
    return int(share * part * whole.bytes + share * 2 * whole.largest / tp)


class FirstBatch:
    """How many samples of a model's first batch fit. Made of the model while it is whole, of which it has a
    copy without memory; without the user's hooks, which are to see numbers.

    Only of models whose modules are all of `KNOWN` packages: forwards of a script's own may keep what they
    make, such as a mask, and would meet tensors without numbers there later."""

    def __init__(self, module: nn.Module, run: RunSettings, refit: Refit) -> None:
        self._run, self._refit, self._dtype = run, refit, run.placement.formats.compute
        self._model: nn.Module | None = None
        for each in module.modules():
            if type(each).__module__.partition(".")[0] not in KNOWN or "forward" in vars(each):
                return
        with contextlib.suppress(Exception):  # of any kind, by what a script has set in its modules
            self._model = copy_to(META, self._dtype, module)
            for each in self._model.modules():
                each._forward_hooks.clear()
                each._forward_pre_hooks.clear()

    def fit(self, memory: int, batch: MicroBatch, objective: Objective) -> Fit:
        """See `fit`. batch: the first micro-batch of the first step."""
        model, run = self._model, self._run
        in_files = is_files(
            tiers_of(run.placement.memory.gradients)[0]
        )  # they have space for one micro-batch
        is_whole = batch.samples == run.micro
        if model is None or not is_whole or (in_files and run.microbatches == 1):
            return UNKNOWN
        sizes = [(max(p.shape, default=1), p.numel()) for p in model.parameters()]
        width, numbers = map(sum, zip(*sizes, strict=True))
        longest = max((each.numel() for each in tensors_in(batch.batch)), default=0)
        if numbers * AT_MOST + longest * width * WIDE <= memory * USED:
            return Fit(None, "all fits")
        # transformers draws from both; fake tensors draw nothing from torch's
        drawn = random.getstate(), np.random.get_state()
        make = partial(copy_to, META, self._dtype, model)
        found = fit(run, self._refit, memory, make, partial(self._look, batch, objective))
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        return found

    def _look(self, batch: MicroBatch, objective: Objective, model: nn.Module) -> Kept | str:
        """What a micro-batch keeps, by `batch`."""
        if any(getattr(each, "scale_grad_by_freq", False) is True for each in model.modules()):
            return "gradients scaled by frequency depend on how a batch is cut"
        if any(isinstance(each, _BatchNorm) for each in model.modules()):
            return "what BatchNorm normalises by depends on how a batch is cut"
        ours = objective.of(model)
        ours.cut(is_split=False, share=None)

        def call(fake: Callable[[Tensor], Tensor]) -> Any:
            inputs = pytree.tree_map_only(Tensor, fake, batch.batch)
            output = ours.output(inputs)
            if ours.is_own:
                return ours.loss(output, inputs, 1.0)
            # a script's loss_fn is to see numbers; most keep one copy of what they get
            return [each.float().log_softmax(-1) for each in tensors_in(output) if each.is_floating_point()]

        return kept_by(model, self._run.forward, device_of_ranks(), call)
