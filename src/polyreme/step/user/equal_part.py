"""Tensors that stand for this rank's one of equal parts of a parameter's numbers, wherever the engine
keeps them.

Invariant: reading one gives the numbers of now, and changing it in place changes the engine's.
Communication: where numbers are read or written, on all data-parallel ranks alike, that of
`ParameterNumbers`, and where they are written an all-gather; none for shapes and dtypes."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from polyreme.distributed.mesh import Axis
from polyreme.errors import ModelError
from polyreme.layout.intervals import ceil_div
from polyreme.models.tensor_access import touching, writes
from polyreme.zero.divided import without_memory
from polyreme.zero.parameter import InMemory
from polyreme.zero.released import followed


class Numbers(Protocol):
    """The numbers of a parameter: `ParameterNumbers`."""

    def whole(self, kind: str) -> Tensor | None: ...
    def set_whole(self, kind: str, value: Tensor | None) -> None: ...


class EqualPart(Tensor):
    """A flat tensor with this rank's equal part of a parameter's numbers, zero beyond their end.

    Writing to it sets the numbers; in 16 bits, masters keep their digits where it does not change. A view or
    result of it is a copy, which cannot be written to."""

    _numbers: Numbers
    _kind: str
    _axis: Axis
    _name: str
    _elements: int

    @classmethod
    def of(cls, numbers: Numbers, kind: str, axis: Axis, name: str, elements: int, like: Tensor) -> EqualPart:
        """Make the tensor for a parameter with `elements` numbers of this kind, in the dtype and on the
        device of `like`."""
        made = without_memory([ceil_div(elements, axis.size)], like).as_subclass(cls)
        made._numbers, made._kind, made._axis, made._name = numbers, kind, axis, name
        made._elements = elements
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EqualPart({self._kind} of {self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = touching(func)
        if name is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "data":
            if getattr(func, "__name__", "") == "__set__" and args[0] is not args[1]:
                args[0].write(args[1])
            return args[0]
        copies: dict[int, Tensor] = {}

        def copy(source: EqualPart) -> Tensor:
            if id(source) not in copies:
                if (numbers := source.read()) is None:
                    raise source._missing()
                copies[id(source)] = numbers
            return copies[id(source)]

        plain_args, plain_kwargs = pytree.tree_map_only(EqualPart, copy, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if writes(name, args, kwargs, EqualPart):
            target = kwargs.get("out", args[0] if args else None)
            target.write(copies[id(target)])
            return target
        for taken in copies.values():
            result = followed(taken, result, _COPY)
        return result

    def read(self) -> Tensor | None:
        """Return a copy of the numbers, or all of a state with a shape of its own; None where there are
        none."""
        whole = self._numbers.whole(self._kind)
        if whole is None or whole.numel() != self._elements:
            return whole
        found = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        start = self._axis.rank * found.numel()
        mine = whole.reshape(-1)[start : start + found.numel()]
        found[: mine.numel()] = mine.to(self.dtype)
        return found

    def write(self, value: Tensor) -> None:
        """Set the numbers to those that the ranks give, each of as many elements as `read` returns.
        Raises ModelError for another number of elements, and where there are no numbers."""
        before = self._numbers.whole(self._kind)
        if before is None:
            raise self._missing()
        if before.numel() != self._elements:
            self._numbers.set_whole(self._kind, value.reshape(before.shape))
            return
        if value.numel() != self.numel():
            raise ModelError(
                f"this rank's part of {self._kind} of {self._name} is set to {value.numel()} elements, and "
                f"has {self.numel()}"
            )
        mine = value.detach().to(self.device, self.dtype).reshape(-1).contiguous()
        given = self._axis.gathered(mine)
        now = given[: before.numel()].view(before.shape)
        self._numbers.set_whole(
            self._kind, torch.where(now == before.to(now.dtype), before, now.to(before.dtype))
        )

    def _missing(self) -> ModelError:
        return ModelError(
            f"{self._kind} of {self._name} is asked for, and there is none: a gradient is there from the "
            "last backward of a step to step(), a state from the first step on"
        )


class _Copy(InMemory):
    """The result of reading an `EqualPart`, which may not be written to."""

    def refuse_writing(self, what: str, parameter: Tensor) -> NoReturn:
        raise ModelError(
            f"{what} writes to what was taken of a parameter's part, which is a copy: write to the part "
            "itself, part.copy_(numbers) or part[:3] = numbers"
        )


_COPY = _Copy()
