"""The engine's set-up, in the order of the functions: from the model that a user gave to this rank's part of
it, ready to train.

Invariant: rank 0's numbers count, whatever the other ranks were given; a model given as a function is never
whole on a rank (but to be measured, on rank 0, for `pipeline.blocks = "time"`).
Communication: broadcasts of what the user's model holds; the measured seconds; what `zero.partition` needs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.load import lacks, unused
from polyreme.config import Config
from polyreme.config.schema import is_files, tiers_of
from polyreme.deferred_init.replay import Recording, record
from polyreme.distributed.hybrid import sharing
from polyreme.distributed.mesh import Axis, Mesh, SimulatedMesh
from polyreme.errors import CheckpointError, ConfigError, ModelError, Problem, named, warn
from polyreme.layout.bucket_layout import Cut
from polyreme.models import huggingface, peft
from polyreme.models.wrappers import unwrap
from polyreme.offload.copy_stream import CopyStream, copy_stream_to
from polyreme.offload.file import BUFFERS, FileStore
from polyreme.offload.host import HostStore
from polyreme.offload.host_transfer import HostTransfer
from polyreme.offload.planned import PlannedStore
from polyreme.offload.store import Store
from polyreme.optim.groups import Recipe
from polyreme.pipeline.executor import RunStage, whole
from polyreme.pipeline.partition import PipelinePartition, keep_stages, layers, partition_model
from polyreme.pipeline.profile import block_seconds, copy_to
from polyreme.pipeline.rank import PipelineRank
from polyreme.pipeline.stage import Stage, refuse_calls
from polyreme.step.accumulation import added, reduced_format
from polyreme.step.loss import LossFn, Objective
from polyreme.step.loss_graph import BY_FREQUENCY
from polyreme.step.precision import DTYPES, cast_floating, master_dtype, warn_of_default
from polyreme.tensor import plan as rules
from polyreme.tensor.layers import put_off_weights
from polyreme.tensor.parallelize import parallelize
from polyreme.zero.bucket_gradients import Microbatches
from polyreme.zero.changes import Roster
from polyreme.zero.divided import make_whole, shaped
from polyreme.zero.formats import Formats
from polyreme.zero.offload_tiers import OffloadTiers
from polyreme.zero.partition import BucketSettings, Division, Placement, Sharding, build_placement
from polyreme.zero.residency import Residency

RUN = uuid.uuid4().hex
"""A number that, with the process', names the runs that it leads, as rank 0: engines made one after the other
may use the same folders."""

Layer = nn.Module | Callable[[], nn.Module]
Model = Layer | Sequence[Layer] | str | Path
"""What `polyreme.initialize` takes."""


def open_model(given: Model, config: Config, mesh: Mesh) -> tuple[nn.Module, Recording | None, Path | None]:
    """The model in training mode; how to make its numbers, if it is on the meta device, as what builds it was
    given; and the directory from which its weights will be read, if they are not in it yet."""
    weights: Path | None = None
    if isinstance(given, str | Path):
        module, recording, weights = _from_directory(Path(given), config)
    else:
        module, recording = _given(given, config, mesh)
        _refuse_tables(module, config, mesh)
        peft.refuse_bare_base(module)
        if not module.training:  # `from_pretrained` returns it so
            module.train()
    huggingface.refuse_unsavable(module)
    if config.origins["precision.compute"] == "default":
        warn_of_default(module, config.precision.compute)
    return module, recording, weights


def _refuse_tables(module: nn.Module, config: Config, mesh: Mesh) -> None:
    """Raise ModelError for tables that their lookups change: each rank would change its own copy, of other
    rows, and no master would; and for gradients that depend on how the batch is cut."""
    cut = config.accumulation * mesh.world_size
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            raise ModelError(f"{name} has max_norm = {each.max_norm}, with which "
                             "lookups change its weight, on each rank another way: "
                             "leave max_norm out, and scale what "
                             "it returns in the model's forward")  # fmt: skip
        if getattr(each, "scale_grad_by_freq", False) is True and cut > 1:
            raise ModelError(f"{name or 'the model'} has scale_grad_by_freq = True, {BY_FREQUENCY}")


def _from_directory(path: Path, config: Config) -> tuple[nn.Module, Recording | None, Path | None]:
    """The model of a Hugging Face directory: to be read by ranges where its tensors are the model's, name by
    name; otherwise transformers reads, renames and converts them, whole on every rank, but never what our
    reader refused."""
    trust, allowed = config.model.trust_remote_code, config.model.allow_unused
    recording, reason = None, ""
    peft.refuse_adapter(path)
    try:
        recording = record(lambda: huggingface.shell(str(path), trust), config.seed)
    except ModelError as error:  # transformers tells what is wrong, or can do it
        reason = str(error)
    try:
        source = Directory(path)
    except CheckpointError as error:
        raise ConfigError([Problem("model.path", str(path), f"its weights cannot be loaded: {error}",
                                   "give a directory that save_pretrained "
                                   "wrote, or model.config to start anew")]) from error  # fmt: skip
    if recording is not None:
        if not (missing := lacks(source, recording.module)):
            others = unused(source, recording.module)
            huggingface.refuse_unused(str(path), recording.module, others, allowed)
            return recording.module, recording, path
        reason = f"its files do not have {named(missing, 3)} as the model does"
    with torch.random.fork_rng([]):  # what may be missing is new
        torch.manual_seed(config.seed)
        model = huggingface.build(
            str(path), None, trust, allow_missing=config.model.allow_missing, allow_unused=allowed
        ).train()
    gib = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 2**30
    warn(
        f"{path} is read whole by every rank, into {gib:.3g} GiB of host memory each, because {reason}: "
        "transformers renames and converts it. engine.save writes a directory that is read in parts"
    )
    return model, None, None


def _given(given: Layer | Sequence[Layer], config: Config, mesh: Mesh) -> tuple[nn.Module, Recording | None]:
    model = given
    if isinstance(model, Sequence) and not isinstance(model, nn.Module):
        built = nn.ModuleList(layer for layer in model if isinstance(layer, nn.Module))
        model = layers(model)
        if not isinstance(model, nn.Module):  # these are copied into the recording
            take_from_rank_0([*built.parameters(), *built.buffers()], mesh.device, mesh.world)
    if isinstance(model, nn.Module):
        give_shapes(model, mesh)
        if mesh.pp.size == 1:  # other stages of a pipeline may have them: `build` looks
            _refuse_meta(model)
        _refuse_inference(model)
        return unwrap(model), None
    if not callable(model):
        raise ModelError(f"the model is a {type(model).__name__}: give initialize() "
                         "a torch.nn.Module, a function that builds one, a "
                         "list of layers, or the path of a Hugging Face directory")  # fmt: skip
    recording = record(lambda: _plain(model()), config.seed)
    return recording.module, recording


def give_shapes(model: nn.Module, mesh: Mesh) -> None:
    """Have parameters that were divided as they were made, over all ranks, be of their whole shapes; and
    whole, to be shared out anew, where ranks have different parts of the model. All ranks must call."""
    (shaped if mesh.data.size == mesh.world_size else make_whole)(model.parameters())


def _refuse_meta(model: nn.Module) -> None:
    if empty := _missing(model):
        raise ModelError(
            f"{empty[0]} is on the meta device, without numbers: give initialize() the function that builds "
            "the model"
        )


def _refuse_inference(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ModelError(
                f"{name} was made inside torch.inference_mode(), and autograd takes no such tensor: build "
                "the model outside of it, or under torch.no_grad()"
            )


def _plain(built: Any) -> Any:
    return unwrap(built) if isinstance(built, nn.Module) else built


@dataclass(frozen=True)
class Built:
    """A model of which each rank has its part. stages: how to run each pipeline stage of this rank; blocks:
    the blocks that it has."""

    placement: Placement
    stages: Mapping[int, RunStage]
    blocks: Mapping[str, nn.Module]


def build(
    module: nn.Module,
    recording: Recording | None,
    recipe: Recipe,
    blocks: Mapping[str, nn.Module],
    pipeline: PipelineRank,
    config: Config,
    mesh: Mesh,
    weights: bool,
) -> Built:
    """Divide the model over pipeline stages, tensor parallelism and data parallelism, in this order.

    blocks: those of the whole model. weights: whether parameters get their numbers here; otherwise they are
    still to be read from files."""
    partition = cut(module, recording, len(pipeline.rank_of), config, mesh)
    if partition is not None and recipe.left_out:
        raise ModelError(
            f"the optimizer leaves out {min(recipe.left_out)}, whose gradient nobody takes on a stage of a "
            "pipeline: call requires_grad_(False) on what is not to be trained"
        )
    in_parts = (
        recording is None and partition is not None and any(mesh.gather_objects(bool(_missing(module))))
    )
    if recording is None:
        # over dp parameters are shared out, by ZeRO
        alike = ("tp",) if in_parts else ("tp", "pp")
        take_from_rank_0(_real(module.parameters()), mesh.device, mesh.axis(*alike))
        take_from_rank_0(_real(module.buffers()), mesh.device, mesh.axis("loss", *alike))
    division = divide(module, partition, pipeline, config, mesh)
    if in_parts:
        _take_shared(module, division, mesh)
    if partition is not None:
        blocks = partition.blocks_of(module, pipeline.mine)
    if pipeline.halved:
        put_off_weights(module)
    placement = share_out(module, blocks, recipe, division, config, mesh)
    if recording is not None:
        _make_numbers(module, recording, placement, mesh, parameters=weights)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(mesh.device).contiguous()
    if partition is None:
        return Built(placement, {0: whole}, blocks)
    stages = {stage: Stage(module, partition, stage) for stage in pipeline.mine}
    refuse_calls(module, partition, stages.values())
    return Built(placement, stages, blocks)


def cut(
    module: nn.Module, recording: Recording | None, stages: int, config: Config, mesh: Mesh
) -> PipelinePartition | None:
    """Which pipeline stage has what, the same on every rank; None for one stage. On a simulated mesh blocks
    are not measured: parameters stand for times."""
    if stages == 1:
        return None
    if peft.learns_prompts(module):
        raise ModelError(
            "PEFT puts learned prompts before this model's inputs, "
            "which a pipeline does not know: set mesh.pp = 1, or use LoRA"
        )
    blocks = config.pipeline.blocks
    if not isinstance(blocks, str):
        return partition_model(module, stages, counts=blocks)
    measured = blocks == "time" and not isinstance(mesh, SimulatedMesh)
    costs = _block_seconds(module, recording, config, mesh) if measured else None
    return partition_model(module, stages, costs=costs, memory=blocks == "parameters")


def _block_seconds(module: nn.Module, recording: Recording | None, config: Config, mesh: Mesh) -> list[float]:
    """Seconds of each block, for one micro-batch: measured by rank 0, on a whole model, for all."""
    micro, dtype = config.batch.micro, DTYPES[config.precision.compute]
    assert micro != "auto"
    batch: Any = huggingface.sample_batch(module, micro, config.data.sequence)
    if batch is None:
        reason = (
            "to be measured, the model has to be called, but only of "
            "Hugging Face models of texts or images is known with what"
        )
        fix = 'write pipeline.blocks = "work", or how many blocks each stage has'
        raise ConfigError([Problem("pipeline.blocks", "time", reason, fix)])
    found: Any = None
    if mesh.rank == 0:
        try:
            batch = cast_floating(batch, dtype, mesh.device)
            trial = copy_to(mesh.device, dtype, module, recording.replay if recording else None)
            found = block_seconds(trial, batch)
        except Exception as error:  # whatever a forward raises; the other ranks wait to hear of it
            found = f"{type(error).__name__}: {error}"
    found = mesh.gather_objects(found)[0]
    if isinstance(found, str):
        raise ModelError('pipeline.blocks = "time": the blocks could not '
                         f'be measured ({found}); write "work", or how many '
                         "blocks each stage has")  # fmt: skip
    return found


def _real(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not tensor.is_meta]


def _take_shared(module: nn.Module, division: Division, mesh: Mesh) -> None:
    """Replace what several stages have by the first one's, in a model that each rank was given with the
    numbers of its own stages alone. Raises ModelError where numbers of this rank's stages are missing."""
    told = mesh.gather_objects([mesh.rank, *_missing(module)])
    if lacking := [report for report in told if len(report) > 1]:
        rank, name = lacking[0][:2]
        raise ModelError(
            f"{name} is on the meta device on rank {rank}, whose pipeline stage has it: give each rank the "
            "numbers of its stages, or give initialize() the function that builds the model"
        )
    for name, parameter in module.named_parameters():
        if (tie := division.ties.get(division.ranks_of(division.shardings[name].stages))) is not None:
            numbers = parameter.data.to(mesh.device).contiguous()
            tie.broadcast(numbers)
            parameter.data = numbers.to(parameter.device)


def _missing(module: nn.Module) -> list[str]:
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]


def take_from_rank_0(tensors: Iterable[Tensor], device: torch.device, ranks: Axis) -> None:
    """Give `tensors`, where they are, the numbers of the first of `ranks`, sent from and to `device`. Those
    that are not contiguous become so."""
    for tensor in tensors if ranks.size > 1 else ():
        numbers = tensor.data.to(device).contiguous()
        ranks.broadcast(numbers)
        tensor.data = numbers.to(tensor.device)


def divide(
    module: nn.Module, partition: PipelinePartition | None, pipeline: PipelineRank, config: Config, mesh: Mesh
) -> Division:
    """Leave of the model this rank's pipeline stages, and of their parameters its part for tensor
    parallelism."""
    cuts = {name: Cut.whole(p.shape, 1) for name, p in module.named_parameters(remove_duplicate=False)}
    dividing: dict[tuple[str, ...], Axis] = {("tp",): mesh.tp}
    if mesh.tp.size > 1:
        sequence = config.mesh.sequence_parallel
        cuts = parallelize(
            module, mesh.tp, rules.plan(module, mesh.tp.size, config.mesh.tp_plan, sequence), sequence
        )
    if partition is None:
        return Division({name: Sharding(each) for name, each in cuts.items()}, dividing, mesh.pp)
    rank_of = pipeline.rank_of
    keep_stages(module, partition, pipeline.mine, mesh.device, DTYPES[config.precision.compute])
    shardings = {name: Sharding(each, partition.stages_of[name]) for name, each in cuts.items()}
    shared = sorted(
        {tuple(sorted({rank_of[stage] for stage in stages})) for stages in partition.tied.values()}
    )
    ties = {ranks: mesh.among("pp", ranks) for ranks in shared if len(ranks) > 1}
    ties = {ranks: axis for ranks, axis in ties.items() if axis.size > 1}
    return Division(shardings, dividing, mesh.pp, rank_of, ties, partition.stages_of)


def divide_again(
    module: nn.Module, roster: Roster, placement: Placement, config: Config, mesh: Mesh
) -> Division:
    """How `module`, which was changed since `placement`, is divided now; its new buffers become rank 0's.

    Raises ModelError where buckets cannot be made again. The ranks have changed it in the same way."""
    give_shapes(module, mesh)
    _refuse_tables(module, config, mesh)
    parameters, told = dict(module.named_parameters(remove_duplicate=False)), roster.changes(module)
    reason = ""
    memory = config.memory
    offloaded = [
        key for key in ("states", "params", "gradients") if is_files(tiers_of(getattr(memory, key))[0])
    ]
    if mesh.pp.size > 1:
        reason = (
            "with mesh.pp each rank has a part of its modules: "
            "save, and initialize a new engine of the changed model"
        )
    elif mesh.tp.size > 1 and not told.only_unfrozen:
        reason = (
            "with mesh.tp its layers are divided already: add "
            "before initialize, or save and initialize a new engine"
        )
    elif offloaded:
        reason = (
            f"memory.{offloaded[0]} is in files: save, and initialize "
            "a new engine of the changed model, or use host memory"
        )
    elif meta := [name for name, p in parameters.items() if p.is_meta and name in told.new]:
        reason = f"{meta[0]} is on the meta device, without numbers: build it on the CPU"
    peft.refuse_bare_base(module)
    if reason:
        what = f"the model ({told})" if str(told) != "nothing" else "the optimizer's groups"
        raise ModelError(f"the engine cannot take in what was changed of {what}: {reason}")
    if mesh.tp.size > 1:
        return placement.division
    for name, buffer in module.named_buffers():
        buffer.data = buffer.data.to(mesh.device).contiguous()
        if name not in roster.buffers:
            take_from_rank_0([buffer], mesh.device, mesh.loss)
    return Division(
        {name: Sharding(Cut.whole(p.shape, 1)) for name, p in parameters.items()}, {("tp",): mesh.tp}, mesh.pp
    )


def share_out(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    recipe: Recipe,
    division: Division,
    config: Config,
    mesh: Mesh,
    carried: Collection[int] = (),
) -> Placement:
    """Move what is left of the model into buckets, shared out over the data-parallel ranks as the ZeRO stage
    says. carried: ids of parameters whose numbers come from where they are now."""
    zero, dtype = config.zero, DTYPES[config.precision.compute]
    assert zero.stage != "auto"
    folders, share = tiers_of(config.memory.states)
    near, _ = tiers_of(config.memory.params)
    reduced, _ = tiers_of(config.memory.gradients)
    transfer = HostTransfer.over(mesh.device) if folders != ["device"] else None
    microbatches: Microbatches = added(config, mesh.loss.size) if config.accumulation > 1 else "one"
    reduce = reduced_format(config, mesh.world_size, microbatches)
    local = reduce if microbatches == "added" else dtype
    formats = Formats(dtype, master_dtype(dtype), reduce, local, zero.quantized_weights)
    residency = Residency.of_stage(zero.stage)
    run = mesh.gather_objects(f"{RUN}-{os.getpid()}")[0]
    compact = None if config.optimizer.states == "fp32" else config.optimizer.states
    states = _store(folders, mesh, run)
    params = _store(near, mesh, run, copy_stream_to(mesh.device), buffers=0)  # it is not streamed
    gradients = None
    if transfer is not None or is_files(reduced):
        copy_stream = None if transfer is None else transfer.copy_stream
        gradients = _store(reduced if is_files(reduced) else ["host"], mesh, run, copy_stream)
    blocks = _released(module, blocks, zero.keep)
    offload = OffloadTiers(states, share, params, compact, transfer, gradients, mesh.gather_objects)
    axis = sharing(mesh, zero.shard_over, zero.quantized_gradients)
    settings = BucketSettings(axis, mesh.device, residency, formats, microbatches, zero)
    return build_placement(module, blocks, recipe, settings, division, offload, carried)


def _released(
    module: nn.Module, blocks: Mapping[str, nn.Module], keep: Sequence[str]
) -> Mapping[str, nn.Module]:
    """The blocks that are gathered for each use: neither they nor what they are in match `keep`."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError([Problem("zero.keep", pattern, "no module of the model has such a name",
                                       "names are such as "
                                       f"{', '.join(list(blocks)[:3] or names[1:4])}")])  # fmt: skip

    def matches(name: str) -> bool:
        parts = name.split(".")
        return any(
            fnmatchcase(".".join(parts[:end]), pattern)
            for end in range(1, len(parts) + 1)
            for pattern in keep
        )

    return {name: block for name, block in blocks.items() if not matches(name)}


def _store(
    where: Sequence[str], mesh: Mesh, run: str, copy_stream: CopyStream | None = None, buffers: int = BUFFERS
) -> Store | None:
    """This rank's tier in the host's memory, or in folders, claimed for `run`; None for the device."""
    if isinstance(mesh, SimulatedMesh) and where != ["device"]:
        return PlannedStore(len(where), buffers) if is_files(where) else PlannedStore()
    if not is_files(where):
        return HostStore(mesh.device, copy_stream) if where == ["host"] else None
    pin = mesh.device.type == "cuda"
    return FileStore(where, mesh.rank, run, buffers=buffers, copy_stream=copy_stream, pin=pin)


def _make_numbers(
    module: nn.Module, recording: Recording, placement: Placement, mesh: Mesh, parameters: bool = True
) -> None:
    """Make the initial values of what this rank has: into its buckets (with `parameters`), or as buffers."""

    def write(name: str, tensor: Tensor) -> None:
        if name in placement.where:
            placement.write(name, tensor)
            return
        made = tensor.clone()
        for each in (name, *recording.aliases.get(name, ())):
            path, _, attribute = each.rpartition(".")
            module.get_submodule(path)._buffers[attribute] = made

    own = placement.where if parameters else ()
    recording.replay(write, {*own, *(name for name, _ in module.named_buffers(remove_duplicate=False))})
    take_from_rank_0(module.buffers(), mesh.device, mesh.axis("loss", "tp"))


def objective(
    module: nn.Module, loss_fn: LossFn | None, made: Recipe, config: Config, mesh: Mesh
) -> Objective:
    """What calls the model, and reads its loss as the config weights it."""
    dtype = DTYPES[config.precision.compute]
    # a model of several dtypes converts between them itself
    wanted = dtype if {*made.own_dtypes.values()} <= {dtype} else None
    return Objective(
        module,
        loss_fn,
        partial(cast_floating, dtype=wanted),
        is_split=config.accumulation * mesh.loss.size > 1,
        share=1 / config.accumulation if config.batch.mean == "ranks" else None,
        tells=mesh.loss.rank == 0 and mesh.tp.rank == 0,
    )
