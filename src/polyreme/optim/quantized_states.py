"""Optimizer states in 2 or 1 bytes a number, widened for each step and rounded after it.

`"bf16"`: bfloat16. `"8bit"`: blocks of BLOCK numbers, each with its largest magnitude s as float32, and for
each number a code k that stands for s (k / 127)² with a sign, or, where numbers cannot be negative, for s (k
/ 255)⁴ (block-wise quantisation after Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022,
with another map than theirs).

Both round at random to one of the two neighbouring codes, more likely to the nearer one, so that the expected
value is the number itself. Rounding to the nearest would never change a second moment: with beta2 = 0.999 a
step changes it by less than half of the distance between codes. A second moment that is not zero is never
rounded to zero, which would make the update infinite.

Invariants: the random bits depend only on the state's name, the count of steps and the place of the number,
and no block is cut, as pieces begin and end at multiples of ALIGN; so results do not depend on tiers, pieces,
shards or threads. A widened number is rounded back to the same bits, whatever the key."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyreme.layout.bucket_layout import ALIGN
from polyreme.optim import cpu_kernels
from polyreme.optim.cpu_kernels import Kernel, State

BLOCK = ALIGN
"""Numbers that share a scale."""

States = Literal["bf16", "8bit"]
"""The formats of moments beside float32."""

SIGNED: Mapping[str, bool] = {"exp_avg": True, "momentum_buffer": True, "exp_avg_sq": False, "sum": False}
"""The states that can be kept in fewer bits, by torch's name; True if they can be negative."""

NUDGE = 1e-4
"""The largest error of a code's index, which is computed as a root, below its true value."""

SCALE = ".scale"
"""The suffix of a state's name for the scales of its blocks."""


class Key(NamedTuple):
    """The key of the random bits of a rounding: the state's name, the number of its steps, and the place of
    the first number, an integer that differs between the numbers of all pieces."""

    name: str
    steps: int
    at: int

    @property
    def random_offset(self) -> int:
        """The index of the first number's random bits in a sequence that depends on name and steps, modulo
        2^32."""
        return (
            mixed(zlib.crc32(self.name.encode()) ^ mixed(self.steps ^ mixed(self.at >> 32))) + self.at
            & 0xFFFFFFFF
        )


class Format(Protocol):
    """A storage format of one state, in one or several tensors."""

    def fields(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return the dtype and number of elements of each tensor for `size` numbers, by the suffix to the
        state's name."""

    def encode(self, values: Tensor, stored: Mapping[str, Tensor], key: Key) -> None:
        """Round the float32 `values`, which are overwritten, into the tensors `stored`."""

    def decode(self, stored: Mapping[str, Tensor], values: Tensor) -> None:
        """Widen the tensors `stored` into the float32 `values`."""


def format_of(states: States, name: str) -> Format:
    """Return the format of a state of SIGNED."""
    return StochasticBfloat16() if states == "bf16" else BlockQuantizer(SIGNED[name])


class StochasticBfloat16:
    """bfloat16, rounded at random. The relative error is below 2^-7 for normal numbers."""

    def fields(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"": (torch.bfloat16, size)}

    def encode(self, values: Tensor, stored: Mapping[str, Tensor], key: Key) -> None:
        if (compiled := _compiled(values)) is not None:
            compiled.run(compiled.stochastic_bfloat16, [values, stored[""]], [], key.random_offset)
            return
        bits = values.view(torch.int32)
        bits += random(key, values.numel(), values.device).bitwise_and_(0xFFFF)
        stored[""].copy_(bits.bitwise_and_(-0x10000).view(torch.float32))

    def decode(self, stored: Mapping[str, Tensor], values: Tensor) -> None:
        values.copy_(stored[""])


class BlockQuantizer:
    """8 bits for each number and a float32 scale for each block.

    With y the number's magnitude over the block's largest, s, the error is less than s (2 √y + 1/127) / 127
    for signed states (power 2 of 127 codes), and less than s ((r + 1/255)⁴ - r⁴), r = the fourth root of y,
    for the others (power 4 of 255 codes)."""

    def __init__(self, signed: bool) -> None:
        self.signed = signed
        self.top = 127 if signed else 255

    def fields(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        return {"": (torch.int8 if self.signed else torch.uint8, size), SCALE: (torch.float32, size // BLOCK)}

    def encode(self, values: Tensor, stored: Mapping[str, Tensor], key: Key) -> None:
        if (compiled := _compiled(values)) is not None:
            compiled.run(
                compiled.QUANTIZERS[self.signed][0],
                [values, stored[""], stored[SCALE]],
                [self.top, self.top**-2, NUDGE],
                key.random_offset,
            )
            return
        blocks = values.view(-1, BLOCK)
        sizes = blocks.abs()
        scale = sizes.amax(1, keepdim=True)
        root = (sizes / torch.where(scale > 0, scale, 1)).sqrt_()
        if not self.signed:
            root.sqrt_()
        # nudged, so that the value of a code gets that code; at most the last but one, as `above` is the next
        low = root.mul_(self.top).add_(NUDGE).floor_().clamp_(max=self.top - 1)
        below, above = self._value(low) * scale, self._value(low + 1) * scale
        uniform = (
            random(key, values.numel(), values.device).bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float()
            * 2.0**-24
        )
        low += uniform.view_as(low) * (above - below) < sizes - below
        if self.signed:
            low.copysign_(blocks)
        else:
            torch.where(sizes > 0, low.clamp(min=1), low, out=low)
        stored[""].copy_(low.view(-1))
        stored[SCALE].copy_(scale.view(-1))

    def decode(self, stored: Mapping[str, Tensor], values: Tensor) -> None:
        if (compiled := _compiled(values)) is not None:
            compiled.run(
                compiled.QUANTIZERS[self.signed][1], [values, stored[""], stored[SCALE]], [self.top**-2]
            )
            return
        codes = values.copy_(stored[""]).view(-1, BLOCK)
        torch.mul(self._value(codes), stored[SCALE].unsqueeze(1), out=codes)

    def _value(self, codes: Tensor) -> Tensor:
        """The values of codes, as fractions of the scale."""
        square = (codes * codes.abs()).mul_(self.top**-2)
        return square if self.signed else square.square_()


def mixed(x: int) -> int:
    """Hash 32 bits to 32 bits that look random (a finaliser of C. Wellons's search, "lowbias32")."""
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def random(key: Key, size: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each of `size` numbers, as int32: `mixed` of their places."""
    x = torch.arange(key.random_offset, key.random_offset + size, dtype=torch.int64, device=device).to(
        torch.int32
    )
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x ^= (x >> shift) & (1 << 32 - shift) - 1
        x *= factor
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _compiled(values: Tensor) -> ModuleType | None:
    """The compiled loops, if there are any and the tensor is on the CPU and large enough."""
    return (
        cpu_kernels.compiler()
        if values.device.type == "cpu" and values.numel() >= cpu_kernels.WORTH
        else None
    )


class QuantizedKernel(Kernel):
    """The kernel of a torch optimizer with moments in the format `states`.

    In the state of a piece, each moment is replaced by the tensors of its format's `fields`, named by the
    moment and their suffix. An optimizer that does not count steps gets a count, which the random bits need.
    Raises ValueError for an optimizer with other states."""

    def __init__(self, optimizer: Optimizer, states: States) -> None:
        super().__init__(optimizer)
        kernel = cpu_kernels.kernel(optimizer)
        if (
            not isinstance(kernel, cpu_kernels.ChunkedKernel)
            or not kernel.moments(optimizer.param_groups[0]).keys() <= SIGNED.keys()
        ):
            raise ValueError(
                f"{type(optimizer).__name__} with these options keeps other states than {', '.join(SIGNED)}"
            )
        self._kernel, self._states = kernel, states

    def fields(self, size: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return the dtype and number of elements of each tensor in the state of a piece of `size`
        numbers."""
        formats = {name: format_of(self._states, name) for name in self.names}
        return {
            name + suffix: field
            for name, form in formats.items()
            for suffix, field in form.fields(size).items()
        }

    @property
    def names(self) -> list[str]:
        """The names of the moments, which are kept in fewer bits."""
        return list(self._kernel.moments(self.optimizer.param_groups[0]))

    @property
    def counts(self) -> bool:
        """Whether the optimizer counts steps itself."""
        return self._kernel.counts

    def widened(self, state: Mapping[str, Tensor], name: str, size: int) -> Tensor:
        """Return a moment of a piece of `size` numbers, as float32."""
        values = torch.empty(size, dtype=torch.float32)
        stored = {suffix: state[name + suffix] for suffix in ("", SCALE) if name + suffix in state}
        format_of(self._states, name).decode(stored, values)
        return values

    def keep(self, state: Mapping[str, Tensor], name: str, values: Tensor, key: Key) -> None:
        """Round the float32 `values` of a moment into the state of a piece."""
        stored = {suffix: state[name + suffix] for suffix in ("", SCALE) if name + suffix in state}
        format_of(self._states, name).encode(values.clone(), stored, key)

    @torch.no_grad()
    def step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: State,
        factor: float = 1.0,
        out: Tensor | None = None,
        first: bool = False,
        at: int = 0,
        later: bool = False,
    ) -> None:
        """See `Kernel.step`. The piece must be flat and float32, and begin and end at multiples of ALIGN."""
        size = parameter.numel()
        fields = self.fields(size)
        first = first or not fields.keys() <= state.keys() or "step" not in state
        if first:
            for name, (dtype, count) in fields.items():
                state.setdefault(name, parameter.new_empty(count, dtype=dtype))
            state["step"] = torch.zeros((), dtype=torch.float32)
        before = state["step"].clone()
        state["step"] += 1
        if parameter.is_meta:  # there is nothing more to do without numbers
            cpu_kernels.told(parameter, gradient, [state[name] for name in fields], out)
            return
        count = int(state["step"])

        compiled = cpu_kernels.compiler()
        step = cpu_kernels.CHUNK if compiled is None else compiled.LEAST

        def update(start: int) -> None:
            stop = min(start + step, size)
            pieces = {
                name: {
                    suffix: _inside(state[name + suffix], start, stop, size)
                    for suffix in ("", SCALE)
                    if name + suffix in fields
                }
                for name in self.names
            }
            wide: State = {name: cpu_kernels.scratch(torch.float32, stop - start, name) for name in pieces}
            if not first:
                for name, stored in pieces.items():
                    format_of(self._states, name).decode(stored, wide[name])
            wide["step"] = before.clone()
            rounded = None if out is None else out[start:stop]
            self._kernel.step(parameter[start:stop], gradient[start:stop], wide, factor, rounded, first)
            for name, stored in pieces.items():
                format_of(self._states, name).encode(wide[name], stored, Key(name, count, at + start))

        if compiled is not None:
            compiled.each(update, range(0, size, step))
        else:
            for start in range(0, size, step):
                update(start)


def _inside(tensor: Tensor, start: int, stop: int, size: int) -> Tensor:
    """The elements for the numbers [start, stop) of `size`, in a tensor with one element for each number or
    for each block."""
    return tensor[start * tensor.numel() // size : stop * tensor.numel() // size]
