"""What modules are given and return in the forwards of a plain model, and the gradients of both.

Invariant: modules are watched by wrapping their forwards, and not by hooks of torch's, for some of which an
engine computes in another way. A recomputed forward is not a forward.
Communication: none."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyreme.models.huggingface import tensors_in
from polyreme.models.patches import Patches


class Key(NamedTuple):
    """A tensor of a forward or backward. kind: "input", "output", "input gradient" or "output gradient" of a
    module's `call`th call in a micro-batch; `place` among several: the argument that it is in, and where."""

    micro: int
    kind: str
    module: str
    call: int
    place: str


Watcher = Callable[[str, Mapping[str, Tensor]], object]
"""Called with a module's name and tensors, by their places."""


def watch(
    model: nn.Module, entered: Watcher, left: Watcher, patches: Patches, names: Collection[str] | None = None
) -> None:
    """Call `entered` before and `left` after each forward of the modules (None: all), until `patches` are
    undone. What they compute is seen by none of torch's modes."""

    def around(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():  # recomputed
                return forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                entered(name, _placed([*enumerate(args), *kwargs.items()]))
            output = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                left(name, _placed([("", output)]))
            return output

        return wrapped

    for name, module in model.named_modules():
        if names is None or name in names:
            patches.forward(module, around(name, module.forward))


def _placed(values: Iterable[tuple[object, object]]) -> dict[str, Tensor]:
    return {f"{name} {at}": each for name, value in values for at, each in enumerate(tensors_in(value))}


class Trace:
    """The tensors of one step of a plain model. micro: the micro-batch under way; None: it is not kept.
    values: the tensors. order: when each came."""

    def __init__(self, model: nn.Module) -> None:
        self.micro: int | None = None
        self.clear()
        watch(
            model, functools.partial(self._keep, "input"), functools.partial(self._keep, "output"), Patches()
        )

    def clear(self) -> None:
        """Forget the step."""
        self.values: dict[Key, Tensor] = {}
        self.order: dict[Key, int] = {}
        self._same: dict[Key, list[Key]] = {}  # of each gradient, those of the same tensor
        self._of: dict[Any, list[Key]] = defaultdict(list)
        self._calls: Counter[tuple[int, str]] = Counter()

    def first_of(self, key: Key) -> int:
        """Return when the tensor whose gradient `key` is got its gradient."""
        return min(self.order[each] for each in self._same[key] if each in self.order)

    def _keep(self, kind: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        if self.micro is None:
            return
        self._calls[self.micro, name] += kind == "input"
        for place, tensor in tensors.items():
            key = Key(self.micro, kind, name, self._calls[self.micro, name] - 1, place)
            self._note(key, tensor)
            if tensor.requires_grad:
                key = key._replace(kind=f"{kind} gradient")
                self._same[key] = self._of[tensor.grad_fn, tensor.output_nr]
                self._same[key].append(key)
                tensor.register_hook(functools.partial(self._note, key))

    def _note(self, key: Key, tensor: Tensor) -> None:
        self.values[key] = tensor.detach().clone()
        self.order.setdefault(key, len(self.order))
