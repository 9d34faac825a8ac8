"""Watches a forward for what takes a part for the whole: operations on divided parameters past their layers,
or along the dimension in which activations are divided. Autograd's graph shows neither of frozen parameters,
nor before torch itself fails.

Only some forwards are watched, as it takes time: see `GradientStates.watching`. No communication."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.models.tensor_access import touching
from polyreme.tensor.divided_dimension import follow
from polyreme.tensor.ops import is_divided

OWN = ("embedding",)
"""Look-ups of rows, which are part of a divided embedding."""
COPIES = ("detach", "data")
"""What gives the numbers of a parameter to others without computing with them."""
BETWEEN = ("torch", "contextlib")
"""Packages whose functions call others for somebody else."""


class Watch(TorchFunctionMode):
    """The context of a forward with `parameters`, of these names and cuts by id.

    Raises ModelError, on all ranks alike. What this package itself calls with gradients off, as the functions
    of autograd that divided layers are made of do, is not looked at."""

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
            raise ModelError(_FAILED.format(known[0][0], error)) from error
        if (name := touching(func)) is not None and isinstance(result, Tensor | tuple | list):
            for leaf in leaves:
                self._on(func, name, leaf, args, kwargs, result)
        return result

    def _on(self, func: Any, name: str, leaf: Tensor, args: Any, kwargs: Any, result: Any) -> None:
        """A function got `leaf`."""
        path, cut = self._parameters.get(id(leaf), ("", None))
        read = getattr(leaf, "_read_of", path if cut is not None and not cut.is_whole else None)
        if read is not None and name in COPIES:
            if isinstance(result, Tensor) and not _is_our_own():
                result._read_of = read  # type: ignore[attr-defined]
        elif read is not None and name not in OWN:
            raise ModelError(WRONG + READ.format(read))
        if name not in OWN and is_divided(leaf) and follow(func, name, leaf, args, kwargs, result):
            raise ModelError(WRONG + _ALONG.format(name))


def _is_our_own() -> bool:
    """Whether this package called the function of torch that is looked at, for no other's sake."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_globals.get("__name__", "")
        if caller != __name__ and caller.split(".")[0] not in BETWEEN and frame.f_code.co_name not in COPIES:
            return bool(caller.startswith("polyreme."))
        frame = frame.f_back
    return False


def _of(tensor: Tensor) -> int:
    """The id of a parameter, or of the one whose gradient is summed in the place of this tensor's."""
    node: Any = None if isinstance(tensor, nn.Parameter) else tensor.grad_fn
    if type(node).__name__ != "_SummedBackward":
        return id(tensor)
    return id(node.next_functions[tensor.output_nr][0].variable)


WRONG = "tensor parallelism (mesh.tp) would train this model wrong:\n  - "
READ = (
    "the loss reads {0}, of which each rank has a part, past the layer that it belongs to, so its value "
    "would be that of a part: for a penalty over weights use optimizer.weight_decay; for a cross entropy in "
    'pieces call the layer, as in model.lm_head(hidden), or write mesh.tp_plan with "replicate" for it'
)
_ALONG = (
    "{0} goes along the dimension in which the outputs of a column layer are divided, and would see one "
    'rank\'s part of it: write mesh.tp_plan with "colwise_gather_output" and "rowwise_split_input" for the '
    'layers before and after, or "replicate"'
)
_FAILED = (
    "{0} cannot be used under tensor parallelism (mesh.tp): {1}. Between a column and a row layer each rank "
    'has a part of the activations: write mesh.tp_plan with "replicate" for these layers, or set mesh.tp = 1'
)
