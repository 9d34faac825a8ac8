"""The model that a user gave, as a module, a function, layers or a directory, made ready to be divided.

Invariant: a model given as a function is never whole on a rank, but recorded. Communication: for layers that
are modules, their numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyreme.checkpoint.formats.huggingface import Directory
from polyreme.checkpoint.load import lacks, unused
from polyreme.config.schema import ModelSection
from polyreme.deferred_init.replay import Recording, record
from polyreme.distributed.mesh import Axis, Mesh
from polyreme.errors import CheckpointError, ConfigError, ModelError, Problem, named, warn
from polyreme.models import huggingface, peft
from polyreme.models.wrappers import unwrap
from polyreme.pipeline.partition import layers
from polyreme.pipeline.profile import copy_to
from polyreme.zero.divided import make_whole, shaped

Layer = nn.Module | Callable[[], nn.Module]
Model = Layer | Sequence[Layer] | str | Path
"""The types of the model that `polyreme.initialize` takes."""


def open_model(
    given: Model, section: ModelSection, seed: int, mesh: Mesh
) -> tuple[nn.Module, Recording | None, Path | None]:
    """Return the model in training mode; the recording that makes its numbers, if it is on the meta device,
    as its builder was given; and the directory from which its weights will be read, if they are not in it
    yet."""
    weights: Path | None = None
    if isinstance(given, str | Path):
        module, recording, weights = _from_directory(Path(given), section, seed)
    else:
        module, recording = _given(given, seed, mesh)
        peft.refuse_bare_base(module)
        if not module.training:  # as `from_pretrained` returns it
            module.train()
    huggingface.refuse_unsavable(module)
    return module, recording, weights


def _from_directory(
    path: Path, section: ModelSection, seed: int
) -> tuple[nn.Module, Recording | None, Path | None]:
    """Open the model of a Hugging Face directory. It is read by ranges where its tensors match the model's by
    name; otherwise transformers reads, renames and converts them, whole on every rank. A checkpoint that our
    reader refuses is never read."""
    trust, allowed = section.trust_remote_code, section.allow_unused
    recording, reason = None, ""
    peft.refuse_adapter(path)
    try:
        recording = record(lambda: huggingface.with_new_weights(str(path), trust), seed)
    except ModelError as error:  # transformers reports the problem, or can handle the model
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
    with torch.random.fork_rng([]):  # for missing weights, which are initialised
        torch.manual_seed(seed)
        model = huggingface.build(
            str(path), None, trust, allow_missing=section.allow_missing, allow_unused=allowed
        ).train()
    gib = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) / 2**30
    warn(
        f"{path} is read whole by every rank, into {gib:.3g} GiB of host memory each, because {reason}: "
        "transformers renames and converts it. engine.save writes a directory that is read in parts"
    )
    return model, None, None


def _given(given: Layer | Sequence[Layer], seed: int, mesh: Mesh) -> tuple[nn.Module, Recording | None]:
    model = given
    if isinstance(model, Sequence) and not isinstance(model, nn.Module):
        built = nn.ModuleList(layer for layer in model if isinstance(layer, nn.Module))
        model = layers(model)
        if not isinstance(model, nn.Module):  # modules are copied into the recording
            take_from_rank_0([*built.parameters(), *built.buffers()], mesh.device, mesh.world)
    if isinstance(model, nn.Module):
        give_shapes(model, mesh)
        if mesh.pp.size == 1:  # in a pipeline other stages may have them: `build` checks
            _refuse_meta(model)
        _refuse_inference(model)
        return unwrap(model), None
    _refuse_uncallable(model)
    recording = record(lambda: _plain(model()), seed)
    return recording.module, recording


def maker(model: Model, trust_remote_code: bool = False) -> Callable[[], nn.Module]:
    """Return a function that builds what `initialize` takes as a model, of which it keeps no memory. Raises
    ModelError for anything else."""
    if isinstance(model, str | Path):
        return lambda: huggingface.new_model(str(model), None, trust_remote_code)
    if isinstance(model, nn.Module):
        return _copies(model)
    if isinstance(model, Sequence):
        parts: list[Any] = [_copies(each) if isinstance(each, nn.Module) else each for each in model]
        return maker(layers(parts))
    _refuse_uncallable(model)

    def build() -> nn.Module:
        if not isinstance(built := _plain(model()), nn.Module):
            given = type(built).__name__
            raise ModelError(f"the function given as the model returned a {given}: return a torch.nn.Module")
        return built

    return build


def _copies(module: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that copies a module with other numbers, and without hooks, which expect its own."""
    bare = copy_to(torch.device("meta"), None, module)
    for each in bare.modules():
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()

    def anew() -> nn.Module:
        made: dict[int, Any] = {
            id(each): torch.empty(each.shape, dtype=each.dtype) for each in bare.buffers()
        }
        for each in bare.parameters():
            numbers = torch.empty(each.shape, dtype=each.dtype)
            made[id(each)] = nn.Parameter(numbers, each.requires_grad)
        return copy.deepcopy(bare, made)

    return anew


def _refuse_uncallable(model: object) -> None:
    if not callable(model):
        raise ModelError(f"the model is a {type(model).__name__}: give initialize() "
                         "a torch.nn.Module, a function that builds one, a "
                         "list of layers, or the path of a Hugging Face directory")  # fmt: skip


def give_shapes(model: nn.Module, mesh: Mesh) -> None:
    """Give parameters that were divided over all ranks as they were made their whole shapes; or their whole
    numbers, to be divided anew, where ranks have different slices or stages of the model. All ranks must
    call."""
    (shaped if mesh.data.size == mesh.world_size else make_whole)(model.parameters())


def _refuse_meta(model: nn.Module) -> None:
    if empty := without_numbers(model):
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


def without_numbers(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers on the meta device."""
    return [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]


def take_from_rank_0(tensors: Iterable[Tensor], device: torch.device, ranks: Axis) -> None:
    """Set `tensors`, where they are, to the numbers of the first of `ranks`, sent from and to `device`. They
    become contiguous."""
    for tensor in tensors if ranks.size > 1 else ():
        numbers = tensor.data.to(device).contiguous()
        ranks.broadcast(numbers)
        tensor.data = numbers.to(tensor.device)
