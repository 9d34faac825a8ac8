"""The number of samples of a micro-batch, where the config leaves it open: as many as fit a rank's memory.

Invariant: the same config on machines of the same memory gives the same number, on every rank, whatever else
their memory is used for; a resumed run keeps its micro-batches.
Communication: `agreed` exchanges the memory of ranks, and rank 0's answer."""

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
"""The share of a rank's memory to plan with; operators, the allocator and libraries take the rest."""
AT_MOST = 32
"""Bytes for each number of a model that no rank exceeds, with AdamW in any precision but fp64."""
WIDE = 256
"""Bytes for each output of a layer and each number of the batch that no model of ours exceeds: 16 copies of
both sides of each matrix, and attention over 20,000 tokens."""
GIB = 1 << 30
META = torch.device("meta")
KNOWN = {"torch", "transformers", "peft"}
"""Packages whose forwards may be called without numbers."""


@dataclass(frozen=True)
class Fit:
    """micro: the most samples of a micro-batch that fit; None: as many as the rule without memory says.
    reason: why. fits: False if not even one sample does."""

    micro: int | None
    reason: str
    fits: bool = True


UNKNOWN = Fit(None, "what fits is not known")


def own_memory() -> int:
    """Return the bytes of memory that this rank computes in: its device's, or the host's, which its ranks
    share."""
    device = device_of_ranks()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host.total()


def agreed(ranks: Axis | Mesh, find: Callable[[int], Fit]) -> tuple[int | None, str]:
    """Return how many samples of a micro-batch fit, as rank 0 finds for the smallest memory of a rank, and
    why; None for as many as the rule without memory says. All ranks must call."""
    gathered = ranks.gather_objects([f"{socket.gethostname()} {boot()}", own_memory()])
    shared = Counter(name for name, _ in gathered) if device_of_ranks().type == "cpu" else Counter()
    memory = min(size // max(shared[name], 1) for name, size in gathered)
    found = find(memory) if ranks.rank == 0 else Fit(None, "")
    micro, reason = ranks.gather_objects([found.micro, found.reason])[0]
    return micro, reason


def derived(micro: int, reason: str) -> str:
    """Return the note for the user on micro-batches that are smaller for lack of memory."""
    return f"batch.micro = {micro} is derived: {reason}"


MakeModel = Callable[[], nn.Module | None]
Measure = Callable[[nn.Module], Kept | str]
Refit = Callable[[int], RunSettings]
"""Returns settings with micro-batches of at most so many samples. Raises ConfigError where a step cannot have
several."""


def fit(run: RunSettings, refit: Refit, memory: int, make: MakeModel, measure: Measure) -> Fit:
    """Find how many samples fit into `memory` bytes a rank, at most as many as a micro-batch of `run` has.

    make: returns the model on the meta device, or None where it is not known. measure: returns the memory
    that a micro-batch of `run` keeps of a model, which it may change."""
    try:
        return _fit(run, refit, int(memory * USED), memory, make, measure)
    except Exception as error:  # other ranks wait; the error is raised again where it belongs
        lines = str(error).splitlines() or [type(error).__name__]
        return Fit(None, f"what fits is not known: {lines[min(1, len(lines) - 1)].strip(' -')}")


def _fit(run: RunSettings, refit: Refit, room: int, memory: int, make: MakeModel, measure: Measure) -> Fit:
    most, of = run.micro, f"of {memory / GIB:.3g} GiB"
    model = make()
    if model is None:
        return Fit(None, f"{UNKNOWN.reason}, as the model is not")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    found = measure(model)
    if isinstance(found, str):
        return Fit(None, f"what fits is not known: {found}")
    own = _activations(run, found, 1.0)
    if numbers * AT_MOST + own <= room:  # a small model fits anyway
        return Fit(None, f"all fits: {_samples(most)} {own / GIB:.3g} GiB {of}")
    states: dict[bool, int] = {}
    needed = 0
    for micro in [n for n in divisors(run.share) if n <= most][::-1]:
        tried = run if micro == most else refit(micro)
        several = tried.microbatches > 1
        if several not in states:
            states[several] = _states(tried, make)
        own = _activations(tried, found, micro / most)
        needed = states[several] + own
        if needed <= room:
            reason = f"{_samples(micro)} {own / GIB:.3g} GiB, beside {states[several] / GIB:.3g} {of}"
            return Fit(None if micro == most else micro, reason)
    return Fit(1, f"not even one sample fits: {needed / GIB:.3g} GiB are needed {of}", fits=False)


def _samples(number: int) -> str:
    return "1 sample keeps" if number == 1 else f"{number} samples keep"


def _states(run: RunSettings, make: MakeModel) -> int:
    """Return the most bytes that a rank takes for the model and a step, beside activations: the larger of the
    first and last pipeline stage."""
    line = lines(run.axes, run.order, "pp")[0]
    found = []
    for rank in {line[0], line[-1]}:
        model = make()
        assert model is not None
        placed = place(model, run, rank)
        works = working_set(placed.placement, run.placement.zero.prefetch)
        near = placed.placement.device.type == "cpu"  # tiers are in the same memory
        counted = works["parameters"] + works["gradients"] + works["states"] + near * works["tiers"]
        found.append(counted + placed.sharded_optimizer.nbytes + placed.memory["buffers"])
    return max(found)


def _activations(run: RunSettings, whole: Kept, share: float) -> int:
    """Return the most bytes that a rank keeps for backwards, with a `share` of the samples for which an
    undivided model keeps `whole`.

    Over tensor parallelism, activations outside its layers stay whole: 10 of 34 parts of a block (Korthikanti
    et al., 2022, arXiv:2205.05198, section 4.1)."""
    tp, pp = run.axes["tp"], run.axes["pp"]
    fraction = 1 / tp if run.placement.sequence_parallel else (10 + 24 / tp) / 34
    fraction /= run.axes["cp"]
    if pp > 1:
        stages = len(stage_ranks(run.schedule, pp, run.virtual))
        table = build(run.schedule, pp, run.microbatches, run.virtual)
        fraction *= max(peak_activations(row) for row in table) / stages
    grows = share * fraction * whole.bytes + share * 2 * whole.largest / tp / run.axes["cp"]
    return int(grows + whole.tile / tp)


class FirstBatch:
    """Finds how many samples fit, by a model's first batch. Made while the model is whole, of which it keeps
    a copy without memory and without the user's hooks, which expect numbers.

    Only for models whose modules are all of `KNOWN` packages: forwards of a script's own may keep tensors,
    such as a mask, and would meet them without numbers later."""

    def __init__(self, module: nn.Module, run: RunSettings, refit: Refit) -> None:
        self._run, self._refit, self._dtype = run, refit, run.placement.formats.compute
        self._model: nn.Module | None = None
        for each in module.modules():
            if type(each).__module__.partition(".")[0] not in KNOWN or "forward" in vars(each):
                return
        with contextlib.suppress(Exception):  # any error, as a script may set anything in its modules
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
        # transformers draws from both; fake tensors draw nothing from torch's generator
        drawn = random.getstate(), np.random.get_state()
        make = partial(copy_to, META, self._dtype, model)
        found = fit(run, self._refit, memory, make, partial(self._measure, batch, objective))
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        return found

    def _measure(self, batch: MicroBatch, objective: Objective, model: nn.Module) -> Kept | str:
        """Return the memory that a micro-batch keeps, by `batch`, or why it is not known."""
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
            # a script's loss_fn expects numbers; most keep one copy of their input
            return [each.float().log_softmax(-1) for each in tensors_in(output) if each.is_floating_point()]

        return kept_by(model, self._run.forward, device_of_ranks(), call)
