"""The step of any rank of a job without its ranks: what it computes, sends and keeps in memory.

The engine itself steps on a simulated rank, on tensors without numbers (`simulation`), for as many
micro-batches as a rank has under way at once; what it does is recorded (`recorder`). The others of a step do
what those in the middle do.

Invariant: there is no second copy of a layout, a schedule or a formula, so that the figures are those of the
run. No communication."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from polyreme.checkpoint.load import Match
from polyreme.checkpoint.reader import BLOCK, THREADS, kept_bytes
from polyreme.checkpoint.save import CheckpointBytes, needed, tensors_like
from polyreme.checkpoint.sources import MASTER, MODEL, TensorInfo
from polyreme.config import Config
from polyreme.distributed.mesh import Mesh, SimulatedMesh
from polyreme.engine import Engine
from polyreme.errors import ModelError
from polyreme.models import huggingface
from polyreme.pipeline.rank import PipelineRank
from polyreme.pipeline.schedule import MESSAGES, Action, peak_activations
from polyreme.placement.opening import Model
from polyreme.planner.allocator import taken
from polyreme.planner.attention import attention_of
from polyreme.planner.flops import Flops
from polyreme.planner.recorder import Block, Phase, Recorded, Recorder
from polyreme.planner.trace import CATEGORIES, Category, Collective, MemoryTrace, Moment, RankTrace, Segment
from polyreme.simulation import META, simulated
from polyreme.step.state.engine_state import needs, payload, take

STEPS = 2
"""Steps on a simulated rank: the last one is recorded, when optimizer states and pooled buffers are there."""
LEAST = 3
"""The fewest micro-batches, where a step has as many: the first, the last and those between differ."""
MakeBatch = Callable[[int], Any]
"""Makes a batch of so many samples; only shapes, dtypes and labels that are left out count."""


def dry_run(
    model: Model,
    config: Config,
    rank: int,
    *,
    batch: MakeBatch | None = None,
    device: torch.device | str = "cpu",
    loss_fn: Any = None,
    per_host: int | None = None,
    **given: Any,
) -> RankTrace:
    """Return what rank `rank` of the run of `config`, which is resolved, does in a step on `device`.

    model: a function that builds it, or what else `initialize` takes that takes no memory. batch: by default
    that of a Hugging Face model of texts or images, of `data.sequence` tokens. per_host: ranks of
    each host, see `simulated`. given: more arguments of `initialize`. Raises what `initialize` would."""
    if batch is not None and not callable(batch):
        raise ModelError(f"batch is a {type(batch).__name__}: give a function that makes so many samples")
    stands_for, whole = torch.device(device), config
    config = with_fewer(config, rank)
    config = config.fitted(int(config.batch.micro))  # what fits into this machine does not count
    with simulated(model, config, rank, META, stands_for, per_host, loss_fn=loss_fn, **given) as engine:
        share = batch(config.share) if batch is not None else _sample(engine, config)
        with attention_of(stands_for.type):
            for _ in range(STEPS - 1):
                engine.train_step(share)
            trace = recorded_step(engine, share, whole)
            return replace(trace, checkpoint=_checkpoint(engine))


def _checkpoint(engine: Engine) -> CheckpointBytes:
    """Return what checkpoints take of a simulated rank: of saves what `checkpoint` says of this rank's
    payload, of the device what the engine's own load takes of it, where it reads nothing."""
    state, mesh = engine._training.engine_state, engine.mesh
    placement, own = state.placement, payload(state, None, {}, {})
    parameters, scalars = placement.division.parameters, dict[str, Any]()
    buckets = {each: [*placement.named(each)] for each in placement.buckets}
    saved = {name: state.saved_name([name]) for name in parameters}
    saved |= {n: state.saved_name(names) for each in buckets.values() for names, _ in each for n in names}
    kinds = {saved[names[0]]: {MODEL} for each in buckets.values() for names, _ in each}
    for each in state.optimizers:
        for names, slot in buckets[each.bucket]:
            states = each.state.shapes(slot)
            kinds[saved[names[0]]] |= {MASTER, *states}
            scalars[names[0]] = {kind: 1.0 for kind, shape in states.items() if shape is None} or None
    shapes = {saved[name]: each.cut.shape for name, each in parameters.items()}
    tensors = tensors_like(own.regions, shapes, kinds)
    for names, buffer in state.buffers():
        saved[names[0]] = state.saved_name(names)
        tensors[MODEL][saved[names[0]]] = TensorInfo(tuple(buffer.shape), buffer.dtype)
    with recorded(engine) as recorder:
        new = {each.bucket: each.state.empty(mesh.computes_on) for each in state.optimizers}
        kept = kept_bytes(tensors, needs(state, tensors, Match(saved, (), (), ()), new, weights_only=False))
        nothing: Any = SimpleNamespace(tensors=tensors, path=Path())
        take(state, nothing, Match({}, (), (), ()), scalars, new, True, mesh.data, ())
    memory = _memory(recorder.segments, {}, 0, on_gpu=False)
    staged = (sum(extent.nbytes for extent in b.offloaded_states or ()) for b in placement.buckets)
    own = replace(own, shared_files=own.shared_files and len(mesh.hosts) == 1)
    return needed(own, tensors, mesh.world_size)._replace(
        load=kept + max(THREADS * BLOCK, *staged), load_device=memory.peak - sum(memory.resting.values())
    )


def recorded_step(engine: Engine, batch: Any, whole: Config | None = None) -> RankTrace:
    """Run the next step of an engine, real or simulated, and return what this rank does in it. whole: the
    config of the run, where the engine's has fewer micro-batches."""
    with recorded(engine, batch) as recorder:
        tokens = engine.train_step(batch).tokens
    count = engine.config.accumulation
    total = count if whole is None else whole.accumulation
    row = _pipeline(engine.config, engine.mesh, total).row
    left_out = sum(tensor.nbytes for tensor in _tensors(batch)) // count * (total - count)
    return trace_of(recorder, engine, row, tokens // count * total, left_out)


def with_fewer(config: Config, rank: int) -> Config:
    """Return a config whose steps have as few micro-batches as show all that rank `rank` does and keeps."""
    mesh, count = _mesh(config, rank), config.accumulation
    most = _most(_pipeline(config, mesh, count))
    fewer = next(
        each for each in range(min(count, LEAST), count + 1) if _most(_pipeline(config, mesh, each)) == most
    )
    return config if fewer == count else config.of_accumulation(fewer)


def _most(place: PipelineRank) -> tuple[int, int]:
    """Return how many forwards a row keeps at once at most, and how many forwards and messages."""
    kept = most = 0
    row, receives = {*place.row}, {"F": "RA", "B": "RG"}
    for action in place.row:
        kept += action.op == "F" or action.op in MESSAGES
        kept -= action.op == "W" or (action.op == "B" and action not in place.halved)
        kept -= len(place.arrived.get(action, ()))
        kept -= (receives.get(action.op), *action[1:]) in row
        most = max(most, kept)
    return peak_activations(place.row), most


def _mesh(config: Config, rank: int) -> SimulatedMesh:
    return SimulatedMesh.of(config.axes, config.mesh.order, rank, META)


def _pipeline(config: Config, mesh: Mesh, microbatches: int) -> PipelineRank:
    return PipelineRank.of(config.schedule, config.pipeline.virtual, microbatches, mesh.pp)


def ranks_of_each_kind(config: Config) -> dict[str, int]:
    """Return a rank of each kind of a resolved config, by name: those of the first pipeline stages, of the
    middle ones and of the last; or "each" where all do alike. They have the last part of a divided sequence,
    which sees no fewer keys than others."""
    pp, mesh = config.axes["pp"], _mesh(config, 0)
    last = next(line for line in mesh.lines("cp") if 0 in line)[-1]
    stages = next(line for line in mesh.lines("pp") if last in line)
    if pp == 1:
        return {"each": last}
    found = {"first": stages[0], "middle": stages[pp // 2], "last": stages[-1]}
    return {name: rank for name, rank in found.items() if pp > 2 or name != "middle"}


def run_kinds(model: Model, config: Config, **given: Any) -> dict[str, RankTrace]:
    """Return the dry run of a rank of each kind, by name. given: see `dry_run`."""
    return {name: dry_run(model, config, rank, **given) for name, rank in ranks_of_each_kind(config).items()}


@contextmanager
def recorded(engine: Engine, batch: Any = ()) -> Iterator[Recorder]:
    """Record what the engine does inside, real or simulated. batch: what the step will be given, where it
    takes memory of the device already."""
    training = engine._training
    recorder = Recorder(engine.module, engine.mesh.device.type)
    gc.collect()
    collects = gc.isenabled()
    gc.disable()  # memory is freed at the same moments in every run
    try:
        buckets = training.placement.buckets
        parameters = [each for b in buckets for each in (b.full, b.device_shard) if each is not None]
        recorder.resting("parameters", parameters)
        recorder.resting("states", [b.master for b in buckets if b.master is not None])
        states = [each for update in training.sharded_optimizer for each in update.on_device()]
        recorder.resting("states", states, anywhere=engine.mesh.computes_on == "cpu")
        recorder.resting("gradients", [each for b in buckets for each in b.gradients.live])
        recorder.resting("gradients", training.placement.pool.pieces)
        recorder.resting("buffers", engine.module.buffers())
        recorder.resting("batch", _tensors(batch))
        for store in training.stores:
            recorder.watch(store)
        with recorder:
            yield recorder
    finally:
        if collects:
            gc.enable()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _sample(engine: Engine, config: Config) -> Any:
    """Return a batch for a Hugging Face model. Raises ModelError for any other one."""
    found = huggingface.sample_batch(engine.module, config.share, config.data.sequence)
    if found is None:
        raise ModelError(
            f"it is not known what {type(engine.module).__name__} takes: give the dry run a function that "
            "makes a batch of so many samples, batch=lambda samples: (torch.zeros(samples, ...), ...)"
        )
    return found


# ---- from the record to the trace


def trace_of(
    recorder: Recorder, engine: Engine, row: Sequence[Action], tokens: int, left_out: int = 0
) -> RankTrace:
    """Return the trace of a recorded step. row: that of the whole step. left_out: bytes of the whole batch
    that the recorded step was not given."""
    mesh, records = engine.mesh, recorder.segments
    segments = [Segment(each.action, tuple(each.events)) for each in records]
    trace = RankTrace(
        rank=mesh.rank,
        coordinates={name: axis.rank for name, axis in mesh.axes.items()},
        axes=_axes(mesh, segments),
        row=tuple(row),
        segments=tuple(segments),
        memory=_memory(records, engine.tiers(), left_out, on_gpu=mesh.computes_on == "cuda"),
        flops=Flops(0, 0, 0),
        traffic={},
        tokens=tokens,
    )
    return replace(trace, flops=_flops(trace, records), traffic=_traffic(trace))


def _axes(mesh: Mesh, segments: Sequence[Segment]) -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each of this rank's axes of several ranks, and of those that several axes
    make ("dp x tp"), or that are parts of one ("cp_ring"). Others have as many ranks of dp as they join."""
    sizes = {name: axis.size for name, axis in mesh.axes.items()}
    sizes |= {e.axis: e.ranks for s in segments for e in s.events if isinstance(e, Collective)}
    found = {}
    for name, size in sizes.items():
        parts = name.split(" x ")
        line = mesh.lines(*(parts if {*parts} <= {*mesh.axes} else ["data"]))
        if size > 1:
            found[name] = tuple(
                mesh.split_lines.get(name, next(each for each in line if mesh.rank in each)[:size])
            )
    return found


def _whole(trace: RankTrace) -> Iterator[Segment]:
    """Yield the segments of the whole step."""
    yield from (each for each in trace.segments if each.action is None)
    yield from (trace.segment(action) for action in trace.row)


def _traffic(trace: RankTrace) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for segment in _whole(trace):
        for event in segment.events:
            if isinstance(event, Collective) and event.verb != "receive":
                axis = found.setdefault(event.axis, {})
                calls, nbytes = axis.get(event.verb, (0, 0))
                axis[event.verb] = calls + 1, nbytes + event.bytes
    return found


def _flops(trace: RankTrace, records: Sequence[Recorded]) -> Flops:
    by_segment = {id(s.events): r.flops for s, r in zip(trace.segments, records, strict=True) if s.events}
    found: dict[Phase, int] = {"forward": 0, "backward": 0, "recompute": 0}
    for segment in _whole(trace):
        for phase, flops in by_segment.get(id(segment.events), {}).items():
            found[phase] += flops
    return Flops(found["forward"], found["backward"], found["recompute"])


def _memory(
    records: Sequence[Recorded], tiers: Mapping[str, Mapping[str, float]], left_out: int, on_gpu: bool
) -> MemoryTrace:
    changes = [(id(block), by) for record in records for _, block, by, _ in record.changes]
    kept = _kept(records)
    live = dict.fromkeys(CATEGORIES, 0) | {"batch": left_out}
    total, timeline, peak = left_out, [], (0, 0, "", {**live})
    resting = {**live}
    for at, record in enumerate(records):
        for index, (event, block, by, module) in enumerate(record.changes):
            category = kept.get(id(block), block.category)
            live[category] += by
            total += by
            if total > peak[0]:
                peak = total, at, module or block.module, {**live}
            if at == 0 and block.born == 0 and index < records[0].resting:
                resting = {**live}
            timeline.append(Moment(at, event, tuple(live.values())))
    return MemoryTrace(
        peak=peak[0],
        by_category=peak[3],
        action=records[peak[1]].action,
        module=peak[2],
        resting=resting,
        host=int(sum(tier["memory"] for tier in tiers.values())),
        files=int(sum(tier["bytes"] for tier in tiers.values() if tier["memory"] < tier["bytes"])),
        timeline=_thin(timeline),
        reserved=taken([("batch", left_out), *changes]).reserved if on_gpu else 0,
    )


def _kept(records: Sequence[Recorded]) -> dict[int, Category]:
    """Return the categories of memory that shows only later what it is for: what a forward leaves for its
    backward, what is received, and the batch that was moved to the device."""
    ends: dict[int, int] = {}
    blocks: dict[int, Block] = {}
    for at, record in enumerate(records):
        for _, block, by, _ in record.changes:
            blocks[id(block)] = block
            if by < 0:
                ends[id(block)] = at
    found: dict[int, Category] = {}
    for key, block in blocks.items():
        action = records[block.born].action
        if block.category != "temporary":
            continue
        if action is None and block.born == 0 and ends.get(key, len(records)) > 0:
            found[key] = "batch"
        elif action is not None and (
            action.op in ("RA", "RG") or (action.op == "F" and ends.get(key, len(records)) > block.born)
        ):
            found[key] = "activations"
    return found


MOST = 2000
"""The most moments of a timeline."""


def _thin(timeline: Sequence[Moment]) -> tuple[Moment, ...]:
    """Return the highest and the lowest moment of each of equal parts of a timeline, in order."""
    size = max(1, 2 * len(timeline) // MOST)
    if size == 1:
        return tuple(timeline)
    found: list[Moment] = []
    for start in range(0, len(timeline), size):
        part = timeline[start : start + size]
        extremes = {
            max(range(len(part)), key=lambda i: sum(part[i].live)),
            min(range(len(part)), key=lambda i: sum(part[i].live)),
        }
        found += [part[i] for i in sorted(extremes)]
    return tuple(found)
