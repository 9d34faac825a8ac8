"""All that an engine is at one moment, to a checkpoint and back: weights, optimizer states, how far training
has come, random numbers, the place in the data.

Invariant: an engine that loads what another of the same layout saved goes on as that one would have, to the
last bit; on any other layout it goes on with the same numbers, and other random ones.
Communication: that of `checkpoint.save` and `checkpoint.load`.
"""

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
from polyreme.checkpoint.save import Payload, small_files
from polyreme.checkpoint.sources import MASTER, MODEL, Source
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
from polyreme.tensor.rng import generators, go_on_from
from polyreme.version import VERSION
from polyreme.zero.bucket import Bucket
from polyreme.zero.sharded_optimizer import Update


@dataclass(frozen=True)
class EngineState:
    """What an engine is to a checkpoint."""

    module: nn.Module
    settings: TrainingSettings
    mesh: Mesh
    placement: Placement
    updates: Sequence[Update]
    step: Step
    randomness: Randomness
    loaders: Loaders

    @cached_property
    def file_names(self) -> Mapping[str, str]:
        """What tensors are called in files, where that is not their name."""
        shapes = {name: part.cut.shape for name, part in self.placement.division.shardings.items()}
        shapes |= {name: tuple(buffer.shape) for names, buffer in self.buffers() for name in names}
        return huggingface.file_names(self.module, shapes)

    def saved_name(self, names: Sequence[str]) -> str:
        """The name in files, among all names of a tensor."""
        name = huggingface.saved_name(self.module, names)
        return self.file_names.get(name, name)

    def layout(self) -> dict[str, Any]:
        """The size of each axis of the mesh, and their order: where random numbers are the same."""
        return {
            **{name: axis.size for name, axis in self.mesh.axes.items()},
            "order": list(self.settings.order),
        }

    def buffers(self) -> list[tuple[list[str], Tensor]]:
        """The persistent ones, with all their names."""
        persistent = entries(self.module).keys()
        found: dict[int, tuple[list[str], Tensor]] = {}
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if name in persistent:
                found.setdefault(id(buffer), ([], buffer))[0].append(name)
        return list(found.values())


@dataclass(frozen=True)
class Loaded:
    """What `engine.load` found. path: the checkpoint. state: steps, samples, tokens, ... of its run; empty
    for weights alone. extra: what `engine.save` was given, or what a checkpoint of DeepSpeed has beside its
    tensors (see `DeepSpeedCheckpoint`). notes: what there is to say of it."""

    path: Path
    state: Mapping[str, Any]
    extra: Mapping[str, Any]
    notes: Sequence[str]


def adapters(engine: EngineState) -> dict[str, Tensor] | None:
    """Whole copies of what PEFT's files of adapters hold, on rank 0; nothing for other models; None, with a
    warning, where PEFT, which rank 0 calls, would leave out what another pipeline stage has. All ranks must
    call."""
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
    """Names of what PEFT's files hold, over all pipeline stages; and those of them that rank 0 does not see.
    All ranks must call."""
    told: list[Any] = engine.mesh.pp.gather_objects(
        sorted(peft.adapters(engine.module, engine.placement.division.shardings))
    )
    wanted = {name for each in told for name in each}
    return wanted, sorted(wanted.difference(told[0]))


def adapters_alone(engine: EngineState) -> set[str]:
    """Names of all that a checkpoint of adapters alone has. All ranks must call. Raises ModelError where
    PEFT's files would not have it, or more trains."""
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
    """What is trained beside what has these names, over all pipeline stages. All ranks must call."""
    trained = [each for update in engine.updates for each, _ in engine.placement.named(update.bucket)]
    told: list[Any] = engine.mesh.pp.gather_objects(
        [each[0] for each in trained if set(names).isdisjoint(each)]
    )
    return [name for each in told for name in each]


def payload(
    engine: EngineState, tokenizer: Any, extra: Mapping[str, Any], adapters: Mapping[str, Tensor] | None,
    only: Collection[str] | None = None,
) -> Payload:  # fmt: skip
    """What this rank gives to a checkpoint; `adapters` to PEFT's files, if there are any. only: names
    of the tensors that it has, where these are not all. Raises CheckpointError for what a checkpoint
    cannot hold."""
    module, settings, mesh = engine.module, engine.settings, engine.mesh
    try:
        extra = json.loads(json.dumps(extra))  # the caller may change it while it is written
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra= is kept as JSON, which cannot hold it: {error}") from error
    resume = Resume(
        state=engine.step.state_dict(),
        mesh=engine.layout(),
        zero_stage=int(settings.zero.stage),
        data={"loaders": engine.loaders.state_dict()},
        config=settings.written(),
        versions={"polyreme": VERSION, "torch": torch.__version__},
        extra=extra,
    )
    wanted = lambda names: only is None or not {*names}.isdisjoint(only)  # noqa: E731
    return Payload(
        regions=[region for region in saved(engine.placement, engine.updates) if wanted(region.names)],
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
        # hosts do not see what others have written of a page, and would write it back
        shared_files=settings.checkpoint.shared_files and len(mesh.hosts) == 1,
        weights=MODEL if only is None else ADAPTERS,
        storages={parameter.untyped_storage().data_ptr() for parameter in module.parameters()} - {0},
    )


def restore(engine: EngineState, path: Path, strict: bool, weights_only: bool, axis: Axis) -> Loaded:
    """Make the engine what the checkpoint at `path` says; or the newest complete one of the run's folder
    `path`, as rank 0 sees it.

    Raises CheckpointError on every rank, and then nothing has changed."""
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
                {update.bucket: update.state.empty() for update in engine.updates} if alike else {}
            )
            source = load.verify(source, _needs(engine, source, found, new_states, weights_only), axis)
            scalars = _look(engine, source, found, strict, weights_only, axis)
        except CheckpointError as error:
            problems.append(f"{each} was passed over: {error}")
            if len(problems) == len(candidates):
                raise CheckpointError("\n".join([*problems[:-1], str(error)])) from error
        else:
            return _take(engine, source, found, scalars, new_states, weights_only, axis, problems)
    raise AssertionError  # one of them was the last


def _open(path: Path, axis: Axis) -> Source:
    found: list[Source] = []
    collectively(axis, lambda: found.append(open_source(path)))
    return found[0]


Scalars = dict[str, dict[str, float] | None]
"""The states of a parameter that are one number, by its first name; None for one without states."""
NewStates = Mapping[Bucket, Mapping[str, Tensor]]
"""The memory for new states; see `OptimizerState.empty`."""


def _match(engine: EngineState, source: Source, axis: Axis) -> load.Match:
    """Which of the source's tensors are this rank's."""
    placement = engine.placement
    named = [names for bucket in placement.buckets for names, _ in placement.named(bucket)]
    tensors = [load.Wanted(names, placement.division.shardings[names[0]].cut.shape) for names in named]
    wanted = [*tensors, *(load.Wanted(names, tuple(buffer.shape)) for names, buffer in engine.buffers())]
    if isinstance(source, Directory) and source.adapters_only:
        has, _ = _adapter_names(engine)
        if not has:
            raise CheckpointError(f"{source.path} has adapters alone, and the "
                                  "model has none: give initialize() the base with "
                                  "peft.get_peft_model, or open it with "
                                  "peft.PeftModel.from_pretrained(base, path)")  # fmt: skip
        has |= {
            name for update in engine.updates for names, _ in placement.named(update.bucket) for name in names
        }
        wanted = [each for each in wanted if not has.isdisjoint(each.names)]
    return load.match(source, wanted, engine.file_names, huggingface.base_prefix(engine.module), axis)


def _needs(
    engine: EngineState, source: Source, found: load.Match, new_states: NewStates, weights_only: bool
) -> Iterator[Need]:
    """What this rank will read of the source; see `load.verify`."""
    placement = engine.placement
    for bucket in placement.buckets:
        names_of = {slot.name: names for names, slot in placement.named(bucket)}
        memory = new_states.get(bucket, {})
        for part in bucket.layout.within(bucket.region.start, bucket.region.stop):
            first = names_of[part.name][0]
            if first not in found.name_of:
                continue
            cut, rank = placement.division.shardings[first].cut, placement.division.over(first).rank
            name, size = found.name_of[first], part.stop - part.start
            needed = list(load.needs(source, name, cut, rank, part.start, part.stop, memory, part.offset))
            coming = Counter[str]()
            for need in needed:
                coming[need.kind] += (need.stop - need.start) * (need.into is not None)
            for kind, target in memory.items():
                if coming[kind] < size:  # nobody reads padding
                    target[part.offset :][:size].zero_()
            yield from (need for need in needed if not weights_only or need.kind in (MODEL, MASTER))
    for names, buffer in engine.buffers():
        if names[0] in found.name_of:
            yield Need(MODEL, found.name_of[names[0]], 0, buffer.numel())


def _look(
    engine: EngineState, source: Source, found: load.Match, strict: bool, weights_only: bool, axis: Axis
) -> Scalars:
    """The states of the source that are one number. Raises CheckpointError where it is not what was asked
    for; nothing changes."""
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
    """The shapes of the optimizer's states that a source has of a parameter, by their name."""
    kinds = sorted(source.tensors.keys() - {MODEL, MASTER})
    return {kind: source.tensors[kind][name].shape for kind in kinds if name in source.tensors[kind]}


def _try_options(engine: EngineState, source: Source, found: load.Match) -> None:
    """Have each optimizer expect the states that the source has, where it has them by its options: as it was
    made, as they are now, or as they were saved."""
    resume: Resume | None = getattr(source, "resume", None)
    options, saved = engine.step.progress.options, {} if resume is None else resume.state.get("options", {})
    if wrong := options.unusable(saved):
        raise damaged(source.path / NAME, f"state: the optimizer cannot have the option {wrong}")
    ways = options.ways(saved)
    for update in engine.updates:
        there = {
            slot.name: _states_of(source, found.name_of.get(names[0], "")).keys()
            for names, slot in engine.placement.named(update.bucket)
        }
        update.state.try_options(ways, there)


def _left_behind(engine: EngineState, source: Source, found: load.Match) -> list[str]:
    """What there is to say of optimizer states of parameters that nothing trains here."""
    trained = {names[0] for update in engine.updates for names, _ in engine.placement.named(update.bucket)}
    left = [own for own, name in found.name_of.items() if own not in trained and _states_of(source, name)]
    if not left:
        return []
    return [
        f"the optimizer states of {named(left)} are left behind, as no group of the optimizer trains "
        "it here: unfreeze it, or add its group, before load() to have them"
    ]


def _scalars(engine: EngineState, source: Source, found: load.Match) -> Scalars:
    """The states that are one number of each parameter of which this rank trains elements, if it has states.
    Raises CheckpointError where these are not those of the optimizer."""
    scalars: Scalars = {}
    for update in engine.updates:
        mine = {slot.name for slot in update.state.slots()}
        for names, slot in engine.placement.named(update.bucket):
            name = found.name_of.get(names[0], "") if slot.name in mine else ""
            if not (there := _states_of(source, name)):
                continue
            cut, expected = engine.placement.division.shardings[names[0]].cut, update.state.shapes(slot)
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
    """Return when weights may change."""
    engine.step.begin()
    for bucket in engine.placement.buckets:
        bucket.settle()


def _fill(source: Source, found: load.Match, regions: Iterable[Region]) -> None:
    """Read those regions that were found."""
    there = [
        (region, found.name_of[region.names[0]]) for region in regions if region.names[0] in found.name_of
    ]
    masters = source.tensors.get(MASTER, {})
    kind_of = lambda kind, name: MODEL if kind == MASTER and name not in masters else kind  # noqa: E731
    load.fill(source, ((kind_of(region.kind, name), name, region) for region, name in there))


def _take(
    engine: EngineState,
    source: Source,
    found: load.Match,
    scalars: Scalars,
    new_states: NewStates,
    weights_only: bool,
    axis: Axis,
    problems: Sequence[str],
) -> Loaded:
    """Read what was found and is not yet in `new_states`, which become the states. A file that can no longer
    be read is an error on every rank, but then numbers have changed."""
    placement = engine.placement
    resume: Resume | None = getattr(source, "resume", None)
    _settle(engine)

    def read() -> None:
        for bucket in placement.buckets:
            if not bucket.trainable:
                _fill(source, found, frozen(placement, bucket))
                bucket.store()
        for update in engine.updates:
            numbers = {slot.name: scalars[names[0]] for names, slot in placement.named(update.bucket)}
            with update.state.loading(numbers, new_states.get(update.bucket, {})):
                _fill(source, found, masters(placement, update))
                _fill(source, found, states(placement, update))
            update.bucket.store()
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
    """Take over how far training has come, the random numbers and the place in the data. Returns what there
    is to say of that."""
    size, notes, state = engine.settings.batches.now.size, [], resume.state
    if resume.config.get("precision", {}).get("compute") not in SCALED:  # then 1 was no loss scale
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
    """Have the script and the model draw what they would have drawn; on another mesh the script alone, if all
    ranks drew the same. Returns what there is to say of that."""
    mesh, notes = engine.mesh, []
    own, same = resume.rng.get(str(mesh.rank)), engine.layout() == resume.mesh
    if not same or own is None:
        notes.append(
            "saved on another mesh: the weights are the same, "
            "random numbers such as dropout's are others from here on"
        )
        own = resume.rng.get("0")
        if own is None or any(each.get("cpu") != own.get("cpu") for each in resume.rng.values()):
            # alike on the ranks of a tp or pp line
            torch.manual_seed(engine.settings.seed + mesh.data.rank + 1_000_003 * engine.step.state.step)
            return notes
    try:
        cuda = _bytes(own["cuda"]) if mesh.device.type == "cuda" and "cuda" in own else None
        go_on_from((_bytes(own["cpu"]), cuda), mesh.device)
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
    """Take over the steps behind a checkpoint of another program, which says no more of the past."""
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
    """Those that modules hold, by the keys of their states."""
    return {
        f"generator {name}.{attribute}": value
        for name, module in engine.module.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


def _random_states(engine: EngineState) -> dict[str, bytes]:
    """Where the generators of the script and of modules are, and what the model's numbers are made from."""
    cpu, cuda = generators(engine.mesh.device)
    found = {"cpu": cpu.numpy().tobytes(), "model": engine.randomness.seed.to_bytes(8)}
    found |= {key: each.get_state().numpy().tobytes() for key, each in _own_generators(engine).items()}
    return found if cuda is None else {**found, "cuda": cuda.numpy().tobytes()}


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
