"""Removes the wrappers around a model, such as torch.compile's or DistributedDataParallel, so that its names
are those of the plain model.

Invariant: no name in the module that `unwrap` returns has a wrapper's prefix, and it computes the same as the
wrapped one, but without the wrapper's communication. A wrapper that the caller still has calls the plain
module from then on. A wrapper that cannot be removed is refused."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from polyreme.errors import ModelError, warn

COMPILE = "compile = true in the config compiles its blocks"
INSIDE = {
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod", COMPILE),
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module", "the engine reduces "
                                                                        "the gradients itself"),
    "torch.nn.parallel.data_parallel.DataParallel": ("module", "start one process for each "
                                                               "device: polyreme launch"),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper":
        ("_checkpoint_wrapped_module", 'memory.activations = "recompute" in the config does it'),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper":
        ("_checkpoint_wrapped_module", 'memory.activations = "host" in the config does it'),
}  # fmt: skip
"""The attribute with the wrapped module, by class of wrapper, and the way to do here what the wrapper did."""

FOREIGN = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor",
    "deepspeed.",
)
"""Packages whose modules and parameters are shards of a model, or communicate."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return `model` without the wrappers around it and the modules in it, with a warning for each kind.

    Raises ModelError for a model that another library has divided, and for wrappers that do more than call
    the module."""
    _refuse_divided(model)
    notes: dict[str, str] = {}
    plain = _opened(model, notes)
    for parent in list(plain.modules()):
        for name, child in parent._modules.items():
            if child is not None and (inner := _opened(child, notes)) is not child:
                parent._modules[name] = inner
    for module in plain.modules():
        if module._compiled_call_impl is not None:  # module.compile() made it
            module._compiled_call_impl = None
            notes["module.compile()"] = COMPILE
        compiled = vars(module).get("forward")
        if (forward := getattr(compiled, "_torchdynamo_orig_callable", None)) is not None:
            module.forward = forward
            notes["torch.compile(module.forward)"] = COMPILE
    for what, instead in notes.items():
        warn(f"the model was taken out of {what}, so that its names are the plain model's; {instead}")
    return plain


def _opened(module: nn.Module, notes: dict[str, str]) -> nn.Module:
    """Return the module inside of all wrappers around `module`, which call it directly from now on."""
    while (found := INSIDE.get(_path(type(module)))) is not None:
        attribute, notes[type(module).__name__] = found
        inner: nn.Module = getattr(module, attribute)
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            raise ModelError(f"hooks are registered on a {type(module).__name__}, "
                             "which is not trained itself: register them on the "
                             f"module in it ({attribute})")  # fmt: skip
        if getattr(module, "mixed_precision", None) is not None:
            raise ModelError("DistributedDataParallel(mixed_precision=...) keeps a "
                             "second copy of every parameter: give initialize() the "
                             'plain module, and write precision.compute = "bf16"')  # fmt: skip
        if (reducer := module.__dict__.get("reducer")) is not None:
            reducer._remove_autograd_hooks()
            # they keep autograd's nodes of the parameters, in their dtype of that time
            module.__dict__.update(reducer=None, logger=None)
        module.__dict__["forward"] = inner.__call__
        module = inner
    return module


def _refuse_divided(model: nn.Module) -> None:
    """Raise ModelError where another library has divided the model or holds its parameters."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{name or 'the model'} is of torch.jit (script or trace), whose forward "
                             "no engine can follow: give initialize() the module that it was made from; "
                             "compile = true in the config compiles its blocks")  # fmt: skip
        if (kind := _foreign(module)) is not None:
            raise ModelError(f"{name or 'the model'} was given to {kind}, which "
                             "divides it itself: give initialize() the plain module; "
                             "zero.stage = 3 shards its parameters, mesh.tp divides its layers")  # fmt: skip
    for name, parameter in model.named_parameters():
        if _foreign(parameter) is not None:
            raise ModelError(f"parameter {name} is a {type(parameter).__name__}, "
                             "of which this rank has a part: give initialize() "
                             "the plain module, before fully_shard or "
                             "parallelize_module; zero.stage = 3 shards it")  # fmt: skip


def _foreign(thing: object) -> str | None:
    """The path of the class that makes a module or a parameter another library's; None if it is none."""
    return next((path for path in _paths(thing) if path.startswith(FOREIGN)), None)


def _paths(thing: object) -> Iterator[str]:
    """Yield the paths of the classes of a module or a parameter, and of the tensor that a parameter holds."""
    kinds = [*type(thing).__mro__, *(type(thing.data).__mro__ if isinstance(thing, nn.Parameter) else ())]
    return (_path(kind) for kind in kinds)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
