"""Checkpoints of the DeepSpeed door: DeepSpeed's folders and its file `latest` around Polyreme's own.

Invariant: no name of a checkpoint leads out of its folder; `latest` is replaced, never written through."""

from __future__ import annotations

import base64
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from stat import S_IEXEC
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyreme.checkpoint.files import read_name
from polyreme.compat.deepspeed.refusal import ArgumentError, TagError, refused
from polyreme.compat.deepspeed.runtime.zero.offload_states import SINCE
from polyreme.compat.deepspeed.utils.logging import log_dist, log_dist_once, logger
from polyreme.errors import CheckpointError
from polyreme.zero.parameter import IN_MEMORY, record_of, state_of

if TYPE_CHECKING:
    import polyreme
    from polyreme.compat.deepspeed.runtime.engine import DeepSpeedEngine

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
"""The file that names the newest checkpoint in place of `latest`, if the config has
checkpoint.load_universal."""
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""The scripts that are written beside checkpoints, to convert them to weights."""
DOOR = "deepspeed"
"""The key in a checkpoint's `extra` for what is saved here beyond Polyreme's own."""
TIED = "tied"
"""The key in that for the first name of each tied parameter, by its further names."""
LARGEST = 2**20
"""The most bytes of a tensor in the client state."""
COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True)
class Parts:
    """The parts of a checkpoint that `load` takes, besides the weights. strict: raise if a tensor of the
    model is missing."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    counts: bool = True


def save(
    engine: DeepSpeedEngine,
    save_dir: str | Path,
    tag: Any,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
) -> bool:
    """Write the checkpoint `save_dir`/`tag`, then the file `latest`. All ranks must call. If they give
    different tags, rank 0's counts.

    Raises ArgumentError for a tag that is no plain name, and for client state that JSON cannot hold; TagError
    for different tags if checkpoint.tag_validation is "fail"; and CheckpointError on every rank if a write
    fails."""
    folder = Path(save_dir)
    name = _plain(f"global_step{engine.global_steps}" if tag is None else str(tag))
    told = engine.polyreme.mesh.gather_objects(name)
    if len(tags := {*told}) > 1:
        differ = f"ranks save under different tags, {', '.join(sorted(tags))}"
        if engine.checkpoint_tag_validation_fail():
            raise TagError(f"{differ}: give all the same")
        name = told[0]
        log_dist(f"{differ}: all of it goes to {name}, rank 0's tag", ranks=[0], level=logging.WARNING)
    extra = {
        TIED: tied(engine.module),
        "client_state": to_json(client_state, "client_state"),
        **{count: getattr(engine, count) for count in COUNTS},
    }
    if engine.lr_scheduler is not None:
        state = {key: value for key, value in engine.lr_scheduler.state_dict().items() if not callable(value)}
        extra["lr_scheduler"] = to_json(state, "lr_scheduler")
    alone = exclude_frozen and _trains_adapters_alone(engine)
    away = engine.polyreme.wake()  # a script may save between offload_states and reload_states
    try:
        engine.polyreme.save(folder / name, extra={DOOR: extra}, adapters_only=alone)
    finally:
        if away:
            engine.polyreme.sleep(*away, since=SINCE)
    if engine.global_rank == 0:
        if save_latest:
            replace_text(folder / LATEST, name)
        for script in SCRIPTS:
            text = files("polyreme.compat.deepspeed.utils").joinpath(script).read_text("utf-8")
            replace_text(folder / script, text)
            make_executable(folder / script)
        log_dist_once(
            "a checkpoint is a Hugging Face directory: its weights are in *.safetensors, not in "
            f"mp_rank_*_model_states.pt; {SCRIPTS[0]} beside it writes them to files of torch's",
            ranks=[0],
            level=logging.WARNING,
        )
    engine.polyreme.mesh.gather_objects(None)  # nobody looks for `latest` before it is there
    return True


def load(
    engine: DeepSpeedEngine, load_dir: str | Path, tag: Any, parts: Parts
) -> tuple[str | None, dict[str, Any] | None]:
    """Resume from a checkpoint, as `DeepSpeedEngine.load_checkpoint` says. Raises CheckpointError if ranks
    see different tags, or the checkpoint is missing on one of them."""
    folder = Path(load_dir)
    newest = LATEST_UNIVERSAL if engine.load_universal_checkpoint() else LATEST
    name = _latest(folder / newest) if tag is None else _plain(str(tag))
    told = engine.polyreme.mesh.gather_objects((name, name is not None and (folder / name).is_dir()))
    if len({each for each, _ in told}) > 1:
        raise CheckpointError(f"{folder}: ranks see different tags, {', '.join(str(t) for t, _ in told)}")
    if name is None:
        return None, None
    if not all(there for _, there in told):
        named = "" if tag is not None else f", which {folder / newest} names"
        raise CheckpointError(f"{folder / name}{named}, is no folder on every rank: {_others(folder)}")
    engine.zero_grad()  # of a window that has begun
    engine.polyreme.wake()
    found = engine.polyreme.load(folder / name, strict=parts.strict, weights_only=not parts.optimizer)
    extra = dict(found.extra.get(DOOR, {}))
    ours = "rates" not in extra
    schedule, client_state = extra.get("lr_scheduler"), extra.get("client_state", {})
    if ours:
        schedule, client_state = from_json(schedule), from_json(client_state)
    else:
        extra["micro_steps"] = extra["global_steps"] * engine.gradient_accumulation_steps()
        groups = engine.optimizer.param_groups if parts.optimizer and engine.optimizer is not None else []
        if len(groups) == len(extra["rates"]):
            for group, rate in zip(groups, extra["rates"], strict=True):
                group["lr"] = rate
    for count in COUNTS if parts.counts else ():
        setattr(engine, count, int(extra.get(count, 0)))
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()  # a window begins
    if parts.scheduler and engine.lr_scheduler is not None and schedule is not None:
        engine.lr_scheduler.load_state_dict({**engine.lr_scheduler.state_dict(), **schedule})
    engine.loaded_checkpoint_tag = name
    return str(folder / name), client_state


def _others(folder: Path) -> str:
    """Return the end of a message that names the checkpoints in a folder."""
    found = sorted(path.name for path in folder.glob("*") if path.is_dir())
    return f"there are {', '.join(found[-3:])}" if found else "there is no other"


def whole(
    engine: DeepSpeedEngine, exclude_frozen: bool, rank0_only: bool, prefix: str = ""
) -> dict[str, Tensor]:
    """Return the model's tensors by name, whole, with or without frozen parameters. All ranks must call."""
    frozen = {
        name
        for name, p in engine.module.named_parameters(remove_duplicate=False)
        if exclude_frozen and not p.requires_grad
    }
    found = engine.polyreme.state_dict(rank0_only=rank0_only)
    return {prefix + name: tensor for name, tensor in found.items() if name not in frozen}


def tied(module: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter, by its further names."""
    first: dict[int, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: known for name, p in every if (known := first.setdefault(id(p), name)) != name}


def save_weights(engine: DeepSpeedEngine, save_dir: str | Path, name: str, exclude_frozen: bool) -> bool:
    """Write the whole model's weights to one file by `torch.save`. All ranks must call."""
    found = whole(engine, exclude_frozen, rank0_only=True)
    if engine.global_rank == 0:
        folder = Path(save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{_plain(name)}.{os.getpid()}"
        torch.save(found, draft)
        draft.replace(folder / name)
    engine.polyreme.mesh.gather_objects(None)
    return True


class _Kept:
    """A holder of an engine, which is an attribute of its model. Copies of the model have an empty one."""

    def __init__(self, engine: polyreme.Engine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def keep_engine(engine: polyreme.Engine, module: nn.Module) -> None:
    """Keep the engine alive as long as the module, whose numbers it has at stage 3. If a script drops the
    engine, as Lightning does between `validate` and `fit`, a second `initialize` can still take the numbers
    over."""
    engine.patches.attribute(module, "_polyreme_engine", _Kept(engine))


def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
    """Drop the module's gradients in place of `module.zero_grad()`, but not those of a window that has begun,
    as DeepSpeed's ZeRO does not: Lightning calls it before it validates."""
    for parameter in module.parameters():
        owner = record_of(parameter).owner()
        if (owner is not None and owner.begun) or parameter.grad is None:
            continue
        if set_to_none:
            parameter.grad = None
        else:
            parameter.grad.detach_().zero_()


def applied(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Return `module` as it is in place of `module._apply`, which `module.cpu()` and `.to(device)` call: at
    stage 3 its parameters are in shards on the engine's device. Raises UnsupportedError for a conversion to
    another dtype."""
    if not any(state_of(parameter) is not IN_MEMORY for parameter in module.parameters()):
        applied: nn.Module = type(module)._apply(module, fn, recurse)
        return applied
    for dtype in {parameter.dtype for parameter in module.parameters()}:
        if (made := fn(torch.empty(0, dtype=dtype))).dtype != dtype:
            raise refused(
                f"the module's conversion to {made.dtype}",
                "its parameters are in shards, whose dtype is the config's",
                "set bf16 or fp16 in the config",
            )
    return module


def state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the module's state dict in place of `module.state_dict()` on ranks other than 0, with an empty
    tensor for each parameter that is in shards, as DeepSpeed does at stage 3. Functions that save ask for it
    on every rank, and write rank 0's, where such a parameter raises ModelError."""
    keeps = bool(kwargs.pop("keep_vars", False))
    # without an engine's mode, which would gather here what rank 0 does not
    with torch._C.DisableTorchFunction():
        found = type(module).state_dict(module, *args, keep_vars=True, **kwargs)
        for name, value in found.items():
            if isinstance(value, Tensor) and not state_of(value).there:
                found[name] = torch.empty(0, dtype=value.dtype, device=value.device)
            elif isinstance(value, Tensor) and not keeps:
                found[name] = value.detach()
    return found


def to_json(value: Any, where: str) -> Any:
    """Return a value as JSON, which `from_json` turns back: one of Python's own types, a tensor of up to
    LARGEST bytes, or argparse's arguments. NumPy's values become numbers and lists. Raises ArgumentError for
    another value, with its place in `where`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == "numpy":
        return to_json(value.tolist(), where)
    if isinstance(value, Tensor) and value.layout == torch.strided and value.nbytes <= LARGEST:
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": [kind, list(value.shape), base64.b64encode(numbers).decode()]}
    if isinstance(value, Namespace):
        return {"arguments": to_json(vars(value), where)}
    if isinstance(value, list | tuple):
        items = [to_json(each, f"{where}[{i}]") for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"()": items}
    if isinstance(value, Mapping):
        return {"{}": [[to_json(k, where), to_json(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    raise ArgumentError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: give numbers, texts, lists, "
        f"tuples, dictionaries and tensors of up to {LARGEST} bytes, or write a file of your own beside it"
    )


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if isinstance(value, Mapping):
        if "()" in value:
            return tuple(from_json(each) for each in value["()"])
        if "arguments" in value:
            return Namespace(**from_json(value["arguments"]))
        if "tensor" in value:
            kind, shape, text = value["tensor"]
            numbers = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
            return numbers.view(getattr(torch, kind)).reshape(shape)
        return {from_json(k): from_json(v) for k, v in value.get("{}", [])}
    return value


def _plain(name: str) -> str:
    """Return the name of a file or folder. Raises ArgumentError if it is a path to somewhere else."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ArgumentError(f"{name!r} is no plain name of a folder's entry: give one without slashes")
    return name


def _latest(path: Path) -> str | None:
    if not path.is_file():
        return None
    return _plain(read_name(path))


def replace_text(path: Path, text: str) -> None:
    """Write a file, or replace it as a whole."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, "utf-8")
    draft.replace(path)


def make_executable(path: str | Path) -> None:
    """Make a file executable for its owner, or write to the log that the file system does not allow it."""
    try:
        Path(path).chmod(Path(path).stat().st_mode | S_IEXEC)
    except OSError as error:
        logger.info(f"{path} is not executable, as its permissions cannot be changed: {error}")


def _trains_adapters_alone(engine: DeepSpeedEngine) -> bool:
    """Return whether the model is one of PEFT's, of which only adapters train."""
    trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    return hasattr(engine.module, "peft_config") and all("lora_" in name for name in trained)
