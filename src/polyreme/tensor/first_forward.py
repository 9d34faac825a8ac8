"""Watches a forward for what takes a part for the whole: operations on divided parameters past their layers,
or along the dimension in which activations are divided. Autograd's graph shows neither of frozen parameters,
nor before torch itself fails.

Only the first forward is watched, as it takes time. No communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from polyreme.errors import ModelError
from polyreme.layout.bucket_layout import Cut
from polyreme.models.tensor_access import touching
from polyreme.tensor.ops import is_divided, mark_divided

OWN = (None, "detach", "data", "embedding")
"""What does not compute with a parameter, and look-ups of rows, which are part of a divided embedding."""
NORMS = ("layer_norm", "rms_norm")
ALONG = {
    **dict.fromkeys(("mean", "sum", "prod", "softmax", "log_softmax", "var", "std", "amax", "amin"), 1),
    **dict.fromkeys(("max", "min", "logsumexp", "cumsum"), 1),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "normalize"), 2),
}
"""Operations along a dimension, and which of their arguments says which."""


class Watch(TorchFunctionMode):
    """The context of a forward with `parameters`, of these names and cuts by id.

    Raises ModelError, on all ranks alike. The functions of autograd that divided layers are made of run with
    gradients off, and are not looked at."""

    def __init__(self, parameters: Mapping[int, tuple[str, Cut]]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            known = [self._parameters[at] for at in map(_of, leaves) if at in self._parameters]
            if not known or "memory" in str(error):
                raise
            raise ModelError(_FAILED.format(known[0][0], error)) from error
        if isinstance(result, Tensor) and (name := touching(func)) not in OWN:
            for leaf in leaves:
                path, cut = self._parameters.get(id(leaf), ("", None))
                if cut is not None and not cut.is_whole:
                    raise ModelError(WRONG + READ.format(path))
                if is_divided(leaf):
                    self._on_divided(str(name), leaf, args, kwargs, result)
        return result

    def _on_divided(self, name: str, part: Tensor, args: Sequence[Any], kwargs: Any, result: Tensor) -> None:
        """An operation on what column layers returned: what has its shape is divided alike."""
        first = args[0] if args else kwargs.get("input")
        if part is first and _is_along_last(name, part, args, kwargs):
            raise ModelError(WRONG + _ALONG.format(name))
        if result.shape == part.shape:
            mark_divided(result)


def _is_along_last(name: str, part: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name in NORMS or (at := ALONG.get(name)) is None:
        return name in NORMS
    default = 1 if name == "normalize" else None
    dims = kwargs.get("dim", args[at] if len(args) > at else default)
    if isinstance(dims, Tensor):  # the greater of two
        return False
    if dims is None or isinstance(dims, bool):
        return True
    return any(dim % part.dim() == part.dim() - 1 for dim in ([dims] if isinstance(dims, int) else dims))


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
