"""How many samples a micro-batch has, where the config leaves that open: as many as fit a rank's memory.

Invariant: the same config on machines of the same memory gives the same number, on every rank, whatever else
their memory is used for: a run that goes on has the micro-batches that it had.
Communication: `agreed` exchanges what ranks have, and rank 0's answer.
"""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from polyreme.config import Config
from polyreme.config.validate import divisors
from polyreme.distributed.agreement import how_to_meet
from polyreme.distributed.mesh import everyone
from polyreme.files.machine import boot
from polyreme.layout.mesh_axes import lines
from polyreme.offload import host
from polyreme.pipeline.schedule import build, peak_activations, stage_ranks
from polyreme.planner.memory_model import working_set
from polyreme.planner.meta_model import expected, meta_model
from polyreme.step.dry_run import device_of_ranks, place
from polyreme.step.kept import Kept, kept

USED = 0.85
"""What of a rank's memory is planned with: operators, the allocator and libraries have the rest."""
AT_MOST = 32
"""Bytes for each number of a model that no rank exceeds, with AdamW in any precision but fp64."""
GIB = 1 << 30


@dataclass(frozen=True)
class Fit:
    """micro: the most samples of a micro-batch that fit; None: as many as the rule without memory says.
    reason: why. fits: whether anything does, as far as is known."""

    micro: int | None
    reason: str
    fits: bool = True


def own_memory() -> int:
    """Bytes of the memory that this rank computes in: its device's, or the host's, which ranks there
    share."""
    device = device_of_ranks()
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host.total()


def memory_of_ranks(config: Config) -> int:
    """Bytes that each rank has where all of them are on this machine, or on others like it."""
    mesh = config.mesh
    ranks = int(mesh.dp) * mesh.tp * mesh.pp * mesh.cp * mesh.ep
    return own_memory() // (ranks if device_of_ranks().type == "cpu" else 1)


def agreed(config: Config, vocabulary: int) -> tuple[Config, list[str]]:
    """The resolved config with micro-batches that fit, and what there is to say: why a step has several. All
    ranks must call."""
    if config.origins["batch.micro"] != "derived" or config.batch.micro == 1:
        return config, []
    ranks = everyone(*how_to_meet(lambda: config))
    told = ranks.gather_objects([f"{socket.gethostname()} {boot()}", own_memory()])
    shared = Counter(name for name, _ in told) if device_of_ranks().type == "cpu" else Counter()
    memory = min(size // max(shared[name], 1) for name, size in told)
    found = fit(config, memory, vocabulary) if ranks.rank == 0 else Fit(None, "")
    micro, reason = ranks.gather_objects([found.micro, found.reason])[0]
    if micro is None:
        return config, []
    config = config.fitted(micro)
    return config, [f"batch.micro = {config.batch.micro} is derived: {reason}"]


def fit(config: Config, memory: int, vocabulary: int | None = None) -> Fit:
    """How many samples fit into `memory` bytes a rank, under a resolved config."""
    try:
        return _fit(config, int(memory * USED), memory, vocabulary)
    except Exception as error:  # other ranks wait; what is wrong is raised again where it belongs to
        lines = str(error).splitlines() or [type(error).__name__]
        return Fit(None, f"what fits is not known: {lines[min(1, len(lines) - 1)].strip(' -')}")


def _fit(config: Config, room: int, memory: int, vocabulary: int | None) -> Fit:
    most, of = int(config.batch.micro), f"of {memory / GIB:.3g} GiB"
    model = _model(config, vocabulary)
    if model is None:
        return Fit(None, "what fits is not known, as the model is not")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    found = kept(model, config, most)
    if isinstance(found, str):
        return Fit(None, f"what fits is not known: {found}")
    own = _activations(config, found, 1.0)
    if numbers * AT_MOST + own <= room:  # nothing more has to be known of a small model
        return Fit(None, f"all fits: {_samples(most)} {own / GIB:.3g} GiB {of}")
    states: dict[bool, int] = {}
    needed = 0
    for micro in sorted(n for n in divisors(config.batch.size // int(config.mesh.dp)) if n <= most)[::-1]:
        tried = config if micro == most else config.fitted(micro)
        several = tried.accumulation > 1
        if several not in states:
            states[several] = _states(tried, vocabulary)
        own = _activations(tried, found, micro / most)
        needed = states[several] + own
        if needed <= room:
            told = f"{_samples(micro)} {own / GIB:.3g} GiB, beside {states[several] / GIB:.3g} {of}"
            return Fit(None if micro == most else micro, told)
    return Fit(1, f"not even one sample fits: {needed / GIB:.3g} GiB are needed {of}", fits=False)


def _samples(number: int) -> str:
    return "1 sample keeps" if number == 1 else f"{number} samples keep"


def _model(config: Config, vocabulary: int | None) -> nn.Module | None:
    return expected(config) if vocabulary is None else meta_model(config, vocabulary)


def _states(config: Config, vocabulary: int | None) -> int:
    """The most bytes that a rank has of the model and takes for a step, beside activations: of the first
    stage's rank and the last one's."""
    sizes: dict[str, int] = {name: getattr(config.mesh, name) for name in config.mesh.order}
    line = lines(sizes, config.mesh.order, "pp")[0]
    found = []
    for rank in {line[0], line[-1]}:
        model = _model(config, vocabulary)
        assert model is not None
        placed = place(model, config, rank)
        works = working_set(placed.placement, config.zero.prefetch)
        near = placed.placement.device.type == "cpu"  # where tiers are in the same memory
        counted = works["parameters"] + works["gradients"] + works["states"] + near * works["tiers"]
        found.append(counted + placed.updates.nbytes + placed.memory["buffers"])
    return max(found)


def _activations(config: Config, whole: Kept, share: float) -> int:
    """The most bytes that a rank keeps for backwards, of a `share` of the samples of which a model that is
    not divided keeps `whole`.

    Over tensor parallelism what is outside its layers stays whole: 10 of 34 parts of a block (Korthikanti et
    al., 2022, arXiv:2205.05198, section 4.1)."""
    mesh, pipeline = config.mesh, config.pipeline
    part = 1 / mesh.tp if mesh.sequence_parallel else (10 + 24 / mesh.tp) / 34
    if mesh.pp > 1:
        stages = len(stage_ranks(config.schedule, mesh.pp, pipeline.virtual))
        table = build(config.schedule, mesh.pp, config.accumulation, pipeline.virtual)
        part *= max(peak_activations(row) for row in table) / stages
    return int(share * part * whole.bytes + share * 2 * whole.largest / mesh.tp)
