"""Watches a forward for operations that would take this rank's slice for the whole: those on divided
parameters outside of their layers, and those along the divided dimension of activations. Autograd's graph
does not show them where parameters are frozen, or torch fails first.

Only some forwards are watched, as it takes time: see `GradientStates.watching`. At every step divided
parameters refuse to be read between a forward and its backward: see `refuse_outside_reads`. No
communication."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import VERIFY, ModelError, PolyremeError
from polyreme.layout.bucket_layout import Cut
from polyreme.models.tensor_access import read
from polyreme.tensor.advice import starred
from polyreme.tensor.divided_dimension import follow
from polyreme.tensor.ops import is_divided

OWN = ("embedding",)
"""Functions that a divided layer itself applies to its parameter: the look-up of an embedding."""
OF_MEMORY = ("data_ptr", "storage", "__dir__")
"""Functions that ask for a parameter's memory, but read none of its numbers."""
OF_SIZES = (RuntimeError, IndexError, ValueError, AssertionError)
"""Errors that torch and models raise for a size that they did not expect."""
COPIES = ("detach", "data")
"""Functions that return a parameter's numbers without computing with them."""
BETWEEN = ("torch", "contextlib")
"""Packages that are passed over in a search for the caller: their functions call for others."""
METHODS = (__name__, "polyreme.zero.parameter", "polyreme.zero.released")
"""Modules that are passed over as well: their functions are methods of parameters."""


class Watch(TorchFunctionMode):
    """The context of a watched forward. parameters: name and cut of each, by id.

    Raises ModelError, on all ranks alike. Functions that this package itself calls with gradients off, as in
    the autograd functions of divided layers, are not checked."""

    def __init__(self, parameters: Mapping[int, tuple[str, Cut]]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled() and _is_our_own():
            return func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            known = [self._parameters[at] for at in map(_of, leaves) if at in self._parameters]
            if not known or "memory" in str(error):
                raise
            raise ModelError(_FAILED.format(known[0][0], error, _FOR_THESE)) from error
        name, asked = read(func, args, kwargs)
        if name is not None and isinstance(result, Tensor | tuple | list):
            for leaf in leaves:
                if id(leaf) not in self._parameters or any(leaf is each for each in asked):
                    self._on(func, name, leaf, args, kwargs, result)
        return result

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Turn an error of sizes, raised where the model expects whole activations, into a ModelError."""
        super().__exit__(kind, error, trace)
        divided = False
        if not isinstance(error, OF_SIZES) or isinstance(error, PolyremeError) or "memory" in str(error):
            return
        for frame, _ in reversed([*traceback.walk_tb(trace)]):
            here = list(frame.f_locals.values())
            divided |= any(is_divided(each) for each in here if isinstance(each, Tensor))
            if divided and isinstance(module := frame.f_locals.get("self"), nn.Module):
                path = starred(self._name(module))
                way = f'."{path}" = "replicate"' if path else _FOR_THESE
                found = path or type(module).__name__, error or type(error).__name__, way
                raise ModelError(_FAILED.format(*found)) from error

    def _name(self, module: nn.Module) -> str:
        """The path of a module, from the names of its parameters."""
        known = [(name, self._parameters.get(id(p))) for name, p in module.named_parameters()]
        return next((path[0].removesuffix(name).rstrip(".") for name, path in known if path is not None), "")

    def _on(self, func: Any, name: str, leaf: Tensor, args: Any, kwargs: Any, result: Any) -> None:
        """Check one tensor that a function got. Raises ModelError where it would be taken for the whole."""
        path, cut = self._parameters.get(id(leaf), ("", None))
        read = getattr(leaf, "_read_of", path if cut is not None and not cut.is_whole else None)
        if read is not None and name in COPIES:
            if isinstance(result, Tensor) and not _is_our_own():
                result._read_of = read  # type: ignore[attr-defined]
        elif read is not None and name not in OWN:
            raise ModelError(WRONG + READ.format(read))
        if name not in OWN and is_divided(leaf) and follow(func, name, leaf, args, kwargs, result):
            raise ModelError(WRONG + _ALONG.format(name))


def refuse_outside_reads(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], path: str) -> None:
    """Raise ModelError where a function `name` that reads the divided parameter `path` was not called by this
    package."""
    looks = name in OWN or name in OF_MEMORY or (name == "type" and len(args) + len(kwargs) == 1)
    if not looks and not _is_our_own():
        raise ModelError(WRONG + READ.format(path))


def _is_our_own() -> bool:
    """Whether this package itself called the function of torch that is being checked."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_globals.get("__name__", "")
        if caller not in METHODS and caller.split(".")[0] not in BETWEEN:
            return bool(caller.startswith("polyreme."))
        frame = frame.f_back
    return False


def _of(tensor: Tensor) -> int:
    """The id of a tensor; for one that `install_summed` put in a parameter's place, the id of the
    parameter."""
    node: Any = None if isinstance(tensor, nn.Parameter) else tensor.grad_fn
    if type(node).__name__ != "_SummedBackward":
        return id(tensor)
    return id(node.next_functions[tensor.output_nr][0].variable)


WRONG = "tensor parallelism (mesh.tp) would train this model wrong:\n  - "
READ = (
    "{0} is read in a loss, or between a forward and its backward, past the layer that it belongs to: each "
    "rank has a part of it, so that the value would be that of a part. For a penalty over weights use "
    "optimizer.weight_decay; for a cross entropy in pieces call the layer, as in model.lm_head(hidden), or "
    'write mesh.tp_plan with "replicate" for it. engine.state_dict(), which every rank must call, has whole '
    "copies; what is to be seen of a part alone, read before the forward or after the backward. Where no "
    f"backward comes, a call of the engine under torch.no_grad() ends that. {VERIFY}"
)
_ALONG = (
    "{0} goes along the dimension in which the outputs of a column layer are divided, and would see one "
    'rank\'s part of it: write mesh.tp_plan with "colwise_gather_output" and "rowwise_split_input" for the '
    f'layers before and after, or "replicate"; {VERIFY}'
)
_FAILED = (
    "{0} cannot be used under tensor parallelism (mesh.tp): {1}. Between a column and a row layer each rank "
    f"has a part of the activations: write mesh.tp_plan{{2}}, or set mesh.tp = 1; {VERIFY}"
)
_FOR_THESE = ' with "replicate" for these layers'
