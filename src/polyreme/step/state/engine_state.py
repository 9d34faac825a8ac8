"""The whole state of an engine, to a checkpoint and back: weights, optimizer states, progress of training,
random numbers, the place in the data.

Invariant: an engine that loads the checkpoint of another one of the same layout continues exactly as that one
would, to the last bit; with any other layout it has the same numbers, but other random ones.
Communication: that of `checkpoint.save` and `checkpoint.load`."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.checkpoint import load
from polyreme.checkpoint.collective_errors import collectively
from polyreme.checkpoint.files import damaged
from polyreme.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from polyreme.checkpoint.formats.huggingface import ADAPTERS, Directory
from polyreme.checkpoint.manifest import NAME, Resume, lacking
from polyreme.checkpoint.open import open_source
from polyreme.checkpoint.reader import Need
from polyreme.checkpoint.run_directory import RunDirectory
from polyreme.checkpoint.save import Payload, address, small_files
from polyreme.checkpoint.sources import MASTER, MODEL, Source, Tensors
from polyreme.config.schema import SCALED
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import CheckpointError, ModelError, named, warn
from polyreme.layout.region import Region
from polyreme.models import huggingface, peft
from polyreme.models.tensor_access import entries
from polyreme.placement.full_parameters import readable
from polyreme.placement.placement import Placement
from polyreme.placement.sharded_state import frozen, masters, saved, states
from polyreme.step.batch.loaders import Loaders
from polyreme.step.state.randomness import Randomness
from polyreme.step.step import Step
from polyreme.step.training_settings import TrainingSettings
from polyreme.tensor.rng import restore_rng_states, rng_states
from polyreme.version import VERSION
from polyreme.zero.bucket import Bucket
from polyreme.zero.bucket_optimizer import BucketOptimizer


@dataclass(frozen=True)
class EngineState:
    """What a checkpoint takes of an engine: the model, the optimizer, the place in the data."""

    module: nn.Module
    settings: TrainingSettings
    mesh: Mesh
    placement: Placement
    optimizers: Sequence[BucketOptimizer]
    step: Step
    randomness: Randomness
    loaders: Loaders

    @cached_property
    def file_names(self) -> Mapping[str, str]:
        """Names of tensors in files, where these differ from their names in the model."""
        shapes = {name: division.cut.shape for name, division in self.placement.division.parameters.items()}
        shapes |= {name: tuple(buffer.shape) for names, buffer in self.buffers() for name in names}
        return huggingface.file_names(self.module, shapes)

    def saved_name(self, names: Sequence[str]) -> str:
        """Return the name under which checkpoint files have a tensor, given all names that the model has for
        it."""
        name = huggingface.saved_name(self.module, names)
        return self.file_names.get(name, name)

    def layout(self) -> dict[str, Any]:
        """Return the size of each mesh axis, and the order of the axes. Engines of equal layouts have the
        same random numbers."""
        return {
            **{name: axis.size for name, axis in self.mesh.axes.items()},
            "order": list(self.settings.order),
        }

    def buffers(self) -> list[tuple[list[str], Tensor]]:
        """Return the persistent buffers, with all their names."""
        persistent = entries(self.module).keys()
        found: dict[int, tuple[list[str], Tensor]] = {}
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if name in persistent:
                found.setdefault(id(buffer), ([], buffer))[0].append(name)
        return list(found.values())


@dataclass(frozen=True)
class Loaded:
    """The result of `engine.load`. path: the checkpoint. state: steps, samples, tokens, ... of its run; empty
    for weights alone. extra: the argument of `engine.save`, or the other contents of a checkpoint of
    DeepSpeed (see `DeepSpeedCheckpoint`). notes: for the user."""

    path: Path
    state: Mapping[str, Any]
    extra: Mapping[str, Any]
    notes: Sequence[str]


def adapters(engine: EngineState) -> dict[str, Tensor] | None:
    """Return whole copies of the tensors in PEFT's adapter files, on rank 0; empty for other models; None,
    with a warning, where PEFT, which rank 0 calls, would leave out those of another pipeline stage. All ranks
    must call."""
    wanted, lost = _adapter_names(engine)
    if lost:
        warn(
            f"{lost[0]} is a part of the adapters which PEFT, called by rank 0, cannot save, as another "
            "pipeline stage has its module: the checkpoint has the whole model, but no files of PEFT's"
        )
        return None
    if wanted and (others := _trained_besides(engine, wanted)):
        warn(
            f"{named(others)} trains too, and PEFT's files have none of it: PeftModel.from_pretrained of "
            "this begins with what the base has there. engine.load takes all of it. Name its module in "
            "modules_to_save of PEFT's config"
        )
    if peft.learns_prompts(engine.module):
        with readable(engine.placement, wanted):
            return peft.prompts(engine.module)
    found = {}
    if wanted:
        for names, tensor in chain(engine.placement.tensors(among=wanted), engine.buffers()):
            if engine.mesh.rank == 0:
                found.update({name: tensor.detach().to("cpu", copy=True) for name in names if name in wanted})
    return found


def _adapter_names(engine: EngineState) -> tuple[set[str], list[str]]:
    """Return the names of the tensors in PEFT's files, over all pipeline stages; and those that rank 0 does
    not have. All ranks must call."""
    gathered: list[Any] = engine.mesh.pp.gather_objects(
        sorted(peft.adapters(engine.module, engine.placement.division.parameters))
    )
    wanted = {name for each in gathered for name in each}
    return wanted, sorted(wanted.difference(gathered[0]))


def adapters_alone(engine: EngineState) -> set[str]:
    """Return the names of all tensors in a checkpoint of adapters alone. All ranks must call. Raises
    ModelError where PEFT's files would not have them, or where more is trained."""
    found, lost = _adapter_names(engine)
    name, instead = type(engine.module).__name__, "save without it, which writes the whole model"
    if not found:
        raise ModelError(f"save(adapters_only=True) of a {name}, which has no "
                         "adapters: give initialize() a model of peft.get_peft_model, "
                         f"or {instead}")  # fmt: skip
    if lost:
        raise ModelError("save(adapters_only=True), but PEFT, called by rank 0, "
                         f"cannot save {lost[0]}, as another pipeline stage has its "
                         "module: take it out of modules_to_save, "
                         f"set mesh.pp = 1, or {instead}")  # fmt: skip
    if others := _trained_besides(engine, found):
        raise ModelError(f"save(adapters_only=True), but {named(others)} trains too, and PEFT "
                         "saves none of it: name its module in modules_to_save "
                         f"of PEFT's config, freeze it, or {instead}")  # fmt: skip
    return found


def _trained_besides(engine: EngineState, names: Collection[str]) -> list[str]:
    """Return trained parameters that have none of these names, over all pipeline stages. All ranks must
    call."""
    trained = [
        each for optimizer in engine.optimizers for each, _ in engine.placement.named(optimizer.bucket)
    ]
    gathered: list[Any] = engine.mesh.pp.gather_objects(
        [each[0] for each in trained if set(names).isdisjoint(each)]
    )
    return [name for each in gathered for name in each]


def payload(
    engine: EngineState, tokenizer: Any, extra: Mapping[str, Any], adapters: Mapping[str, Tensor] | None,
    only: Collection[str] | None = None,
) -> Payload:  # fmt: skip
    """Return what this rank writes of a checkpoint. adapters: for PEFT's files, if there are any. only: names
    of the tensors to save, if not all. Raises CheckpointError for an `extra` that JSON cannot hold."""
    module, settings, mesh = engine.module, engine.settings, engine.mesh
    try:
        extra = json.loads(json.dumps(extra))  # copied, as the caller may change it while it is written
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra= is kept as JSON, which cannot hold it: {error}") from error
    resume = Resume(
        state=engine.step.state_dict(),
        mesh=engine.layout(),
        zero_stage=int(settings.zero.stage),
        data={"loaders": engine.loaders.state_dict()},
        config=settings.config_values(),
        versions={"polyreme": VERSION, "torch": torch.__version__},
        extra=extra,
    )
    wanted = lambda names: only is None or not {*names}.isdisjoint(only)  # noqa: E731
    return Payload(
        regions=[region for region in saved(engine.placement, engine.optimizers) if wanted(region.names)],
        buffers=[
            (names, buffer)
            for names, buffer in engine.buffers()
            if wanted(names) and engine.placement.division.computes(names[0])
        ],
        saved_name=engine.saved_name,
        small=partial(small_files, module, tokenizer, adapters),
        resume=resume,
        rng={name: base64.b64encode(state).decode() for name, state in _random_states(engine).items()},
        limit=int(settings.checkpoint.file_size),
        # a host does not see other hosts' writes to a page, and would overwrite them
        shared_files=settings.checkpoint.shared_files and len(mesh.hosts) == 1,
        weights=MODEL if only is None else ADAPTERS,
        storages={address(parameter) for parameter in module.parameters()},
    )


def restore(engine: EngineState, path: Path, strict: bool, weights_only: bool, axis: Axis) -> Loaded:
    """Load the checkpoint at `path`; or the newest complete one of the run's folder `path`, as rank 0 sees
    it.

    Raises CheckpointError on every rank; nothing has changed then."""
    names = collectively(
        axis, lambda: [each.name for each in RunDirectory(path).candidates()] if path.is_dir() else []
    )[0]
    candidates = [path / name for name in names] or [path]
    problems: list[str] = []
    for each in candidates:
        try:
            source = _open(each, axis)
            found = _match(engine, source, axis)
            if not weights_only:
                collectively(axis, partial(_try_options, engine, source, found))
            alike = isinstance(source, Directory) and not weights_only
            new_states: NewStates = (
                {
                    optimizer.bucket: optimizer.state.empty(engine.mesh.computes_on)
                    for optimizer in engine.optimizers
                }
                if alike
                else {}
            )
            source = load.verify(source, needs(engine, source.tensors, found, new_states, weights_only), axis)
            scalars = _check_match(engine, source, found, strict, weights_only, axis)
        except CheckpointError as error:
            problems.append(f"{each} was passed over: {error}")
            if len(problems) == len(candidates):
                raise CheckpointError("\n".join([*problems[:-1], str(error)])) from error
        else:
            return take(engine, source, found, scalars, new_states, weights_only, axis, problems)
    raise AssertionError  # the last candidate has returned or raised


def _open(path: Path, axis: Axis) -> Source:
    found: list[Source] = []
    collectively(axis, lambda: found.append(open_source(path)))
    return found[0]


Scalars = dict[str, dict[str, float] | None]
"""Single-number states of a parameter, by its first name; None for one without states."""
NewStates = Mapping[Bucket, Mapping[str, Tensor]]
"""Memory for new states; see `OptimizerState.empty`."""


def _match(engine: EngineState, source: Source, axis: Axis) -> load.Match:
    """Match this rank's tensors with those of the source."""
    placement = engine.placement
    named = [names for bucket in placement.buckets for names, _ in placement.named(bucket)]
    tensors = [load.Wanted(names, placement.division.parameters[names[0]].cut.shape) for names in named]
    wanted = [*tensors, *(load.Wanted(names, tuple(buffer.shape)) for names, buffer in engine.buffers())]
    if isinstance(source, Directory) and source.adapters_only:
        has, _ = _adapter_names(engine)
        if not has:
            raise CheckpointError(f"{source.path} has adapters alone, and the "
                                  "model has none: give initialize() the base with "
                                  "peft.get_peft_model, or open it with "
                                  "peft.PeftModel.from_pretrained(base, path)")  # fmt: skip
        has |= {
            name
            for optimizer in engine.optimizers
            for names, _ in placement.named(optimizer.bucket)
            for name in names
        }
        wanted = [each for each in wanted if not has.isdisjoint(each.names)]
    return load.match(source, wanted, engine.file_names, huggingface.base_prefix(engine.module), axis)


def needs(
    engine: EngineState, tensors: Tensors, found: load.Match, new_states: NewStates, weights_only: bool
) -> Iterator[Need]:
    """Return the ranges that this rank will read of a source with these tensors; see `load.verify`."""
    placement = engine.placement
    for bucket in placement.buckets:
        names_of = {slot.name: names for names, slot in placement.named(bucket)}
        memory = new_states.get(bucket, {})
        for held in bucket.layout.within(bucket.region.start, bucket.region.stop):
            first = names_of[held.name][0]
            if first not in found.name_of:
                continue
            cut, rank = placement.division.parameters[first].cut, placement.division.over(first).rank
            name, size = found.name_of[first], held.stop - held.start
            needed = list(load.needs(tensors, name, cut, rank, held.start, held.stop, memory, held.offset))
            coming = Counter[str]()
            for need in needed:
                coming[need.kind] += (need.stop - need.start) * (need.into is not None)
            for kind, target in memory.items():
                if coming[kind] < size:  # padding is not read
                    target[held.offset :][:size].zero_()
            yield from (need for need in needed if not weights_only or need.kind in (MODEL, MASTER))
    for names, buffer in engine.buffers():
        if names[0] in found.name_of:
            yield Need(MODEL, found.name_of[names[0]], 0, buffer.numel())


def _check_match(
    engine: EngineState, source: Source, found: load.Match, strict: bool, weights_only: bool, axis: Axis
) -> Scalars:
    """Return the single-number states of the source. Raises CheckpointError where it does not match the
    model, and nothing changes."""
    if strict and not found.is_exact:
        raise CheckpointError(
            f"{source.path} is not of this model: {found}. With strict=False, what is in both is loaded"
        )
    resume: Resume | None = getattr(source, "resume", None)
    if resume is not None and not weights_only and (error := lacking(source.path, resume)):
        raise error
    scalars: Scalars = dict.fromkeys(
        names[0] for bucket in engine.placement.buckets for names, _ in engine.placement.named(bucket)
    )
    collectively(axis, lambda: None if weights_only else scalars.update(_scalars(engine, source, found)))
    return scalars


def _states_of(source: Source, name: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's optimizer states in a source, by their names."""
    kinds = sorted(source.tensors.keys() - {MODEL, MASTER})
    return {kind: source.tensors[kind][name].shape for kind in kinds if name in source.tensors[kind]}


def _try_options(engine: EngineState, source: Source, found: load.Match) -> None:
    """Make each optimizer expect the states of the source, if it has them with its options: as it was made,
    as they are now, or as they were saved."""
    resume: Resume | None = getattr(source, "resume", None)
    options, saved = engine.step.progress.options, {} if resume is None else resume.state.get("options", {})
    if wrong := options.unusable(saved):
        raise damaged(source.path / NAME, f"state: the optimizer cannot have the option {wrong}")
    ways = options.ways(saved)
    for optimizer in engine.optimizers:
        there = {
            slot.name: _states_of(source, found.name_of.get(names[0], "")).keys()
            for names, slot in engine.placement.named(optimizer.bucket)
        }
        optimizer.state.try_options(ways, there)


def _left_behind(engine: EngineState, source: Source, found: load.Match) -> list[str]:
    """Return a note on optimizer states of parameters that nothing trains here."""
    trained = {
        names[0] for optimizer in engine.optimizers for names, _ in engine.placement.named(optimizer.bucket)
    }
    left = [own for own, name in found.name_of.items() if own not in trained and _states_of(source, name)]
    if not left:
        return []
    return [
        f"the optimizer states of {named(left)} are left behind, as no group of the optimizer trains "
        "it here: unfreeze it, or add its group, before load() to have them"
    ]


def _scalars(engine: EngineState, source: Source, found: load.Match) -> Scalars:
    """Return the single-number states of each parameter of which this rank trains any element, if it has
    states. Raises CheckpointError where they are not those of the optimizer."""
    scalars: Scalars = {}
    for optimizer in engine.optimizers:
        mine = {slot.name for slot in optimizer.state.slots()}
        for names, slot in engine.placement.named(optimizer.bucket):
            name = found.name_of.get(names[0], "") if slot.name in mine else ""
            if not (there := _states_of(source, name)):
                continue
            cut, expected = engine.placement.division.parameters[names[0]].cut, optimizer.state.shapes(slot)
            needed = {
                kind: () if shape is None else cut.shape if shape == slot.shape else shape
                for kind, shape in expected.items()
            }
            if there != needed:
                raise CheckpointError(
                    f"{source.path} has the optimizer states {load.listed(there)} "
                    f"of {name}, but this optimizer has {load.listed(needed)}: "
                    "use the optimizer that it was saved with, or load with weights_only=True"
                )
            numbers = (kind for kind, shape in expected.items() if shape is None)
            scalars[names[0]] = {kind: float(source.read(kind, name, 0, 1)) for kind in numbers}
    return scalars


def _settle(engine: EngineState) -> None:
    """Drop the step under way, and wait until weights may change."""
    engine.step.begin()
    for bucket in engine.placement.buckets:
        bucket.settle()


def _fill(source: Source, found: load.Match, regions: Iterable[Region]) -> None:
    """Fill those regions that the source has."""
    there = [
        (region, found.name_of[region.names[0]]) for region in regions if region.names[0] in found.name_of
    ]
    masters = source.tensors.get(MASTER, {})
    kind_of = lambda kind, name: MODEL if kind == MASTER and name not in masters else kind  # noqa: E731
    load.fill(source, ((kind_of(region.kind, name), name, region) for region, name in there))


def take(
    engine: EngineState,
    source: Source,
    found: load.Match,
    scalars: Scalars,
    new_states: NewStates,
    weights_only: bool,
    axis: Axis,
    problems: Sequence[str],
) -> Loaded:
    """Read everything that the source has and that is not yet in `new_states`, which become the states. A
    file that can no longer be read is an error on every rank, but then numbers have changed."""
    placement = engine.placement
    resume: Resume | None = getattr(source, "resume", None)
    _settle(engine)

    def read() -> None:
        for bucket in placement.buckets:
            if not bucket.trainable:
                _fill(source, found, frozen(placement, bucket))
                bucket.store()
        for optimizer in engine.optimizers:
            numbers = {slot.name: scalars[names[0]] for names, slot in placement.named(optimizer.bucket)}
            with optimizer.state.loading(numbers, new_states.get(optimizer.bucket, {})):
                _fill(source, found, masters(placement, optimizer))
                _fill(source, found, states(placement, optimizer))
            optimizer.bucket.store()
        for names, buffer in engine.buffers():
            if names[0] in found.name_of:
                load.fill_buffer(source, found.name_of[names[0]], buffer)

    collectively(axis, read)
    placement.publish()
    notes = [*problems, *([str(found)] if not found.is_exact else [])]
    if resume is None or weights_only:
        if any(scalars.values()):
            notes += _count_on(engine, source)
        extra = resume.extra if resume else source.extra if isinstance(source, DeepSpeedCheckpoint) else {}
        return Loaded(source.path, {}, extra, notes)
    notes += [*_go_on(engine, resume), *_left_behind(engine, source, found)]
    return Loaded(source.path, resume.state, resume.extra, notes)


def _go_on(engine: EngineState, resume: Resume) -> list[str]:
    """Restore the progress of training, random numbers and the place in the data. Returns notes for the
    user."""
    size, notes, state = engine.settings.batches.now.size, [], resume.state
    # the saved scale of 1 is no loss scale
    if resume.config.get("precision", {}).get("compute") not in SCALED:
        mine = engine.step.state_dict()
        state = {**state, **{key: mine[key] for key in ("loss_scale", "good_steps", "overflows")}}
    fits = state.get("fits") if engine.layout() == resume.mesh else None
    notes += engine.step.load_state_dict({**state, "fits": fits})
    notes += _take_random_numbers(engine, resume)
    before = resume.config.get("batch", {}).get("size")
    if before != size:
        notes.append(
            f"batch.size is {size}, and was {before}: "
            "steps count on, the data goes on at the sample where it was"
        )
    notes += engine.loaders.load_state_dict(resume.data.get("loaders", []))
    return notes


def _take_random_numbers(engine: EngineState, resume: Resume) -> list[str]:
    """Restore the random states of the script and the model; on another mesh the script's alone, if it was
    the same on all ranks. Returns notes for the user."""
    mesh, notes = engine.mesh, []
    own, same = resume.rng.get(str(mesh.rank)), engine.layout() == resume.mesh
    if not same or own is None:
        notes.append(
            "saved on another mesh: the weights are the same, "
            "random numbers such as dropout's are others from here on"
        )
        own = resume.rng.get("0")
        if own is None or any(each.get("cpu") != own.get("cpu") for each in resume.rng.values()):
            # the same on the ranks of a tp or pp line
            torch.manual_seed(engine.settings.seed + mesh.data.rank + 1_000_003 * engine.step.state.step)
            return notes
    try:
        cuda = _bytes(own["cuda"]) if mesh.device.type == "cuda" and "cuda" in own else None
        restore_rng_states((_bytes(own["cpu"]), cuda), mesh.device)
        engine.randomness.begin(
            int.from_bytes(_bytes(own["model"]).numpy().tobytes())
            if "model" in own
            else engine.randomness.seed
        )
        held = _own_generators(engine)
        for key in held.keys() & own.keys():
            held[key].set_state(_bytes(own[key]))
        if lost := sorted(held.keys() - own.keys()):
            notes.append(f"the checkpoint has no state of {named(lost)}, which the model draws from as it is")
    except (KeyError, RuntimeError, TypeError) as error:
        notes.append(
            f"the random numbers are others from here on, as torch cannot take the saved state: {error}"
        )
    return notes


def _count_on(engine: EngineState, source: Source) -> list[str]:
    """Restore the step count of another program's checkpoint, which says no more of the past. Returns notes
    for the user."""
    steps = getattr(source, "state", {}).get("step")
    if steps is None:
        return [
            "the checkpoint does not say how many steps it has "
            "behind it: the learning rate's schedule begins anew"
        ]
    size = engine.settings.batches.now.size
    samples = steps * size
    known = {"step": steps, "samples": samples, "options": {}, "skipped": {}, **getattr(source, "scale", {})}
    engine.step.load_state_dict({**engine.step.state_dict(), **known})
    return [f"goes on after {steps} steps, of batch.size = {size}; random numbers and the data begin anew"]


def _own_generators(engine: EngineState) -> dict[str, torch.Generator]:
    """Return the generators that modules hold, by the keys of their states."""
    return {
        f"generator {name}.{attribute}": value
        for name, module in engine.module.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


def _random_states(engine: EngineState) -> dict[str, bytes]:
    """Return the states of the script's and the modules' generators, and the seed of the model's random
    numbers."""
    cpu, cuda = rng_states(engine.mesh.device)
    found = {"cpu": cpu.numpy().tobytes(), "model": engine.randomness.seed.to_bytes(8)}
    found |= {key: each.get_state().numpy().tobytes() for key, each in _own_generators(engine).items()}
    return found if cuda is None else {**found, "cuda": cuda.numpy().tobytes()}


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
