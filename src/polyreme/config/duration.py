"""Lengths of training: "100 steps", "1e6 tokens"."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

Unit = Literal["steps", "samples", "tokens"]


class Progress(NamedTuple):
    """The progress of training: optimizer steps, samples and tokens over all ranks."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0


class Duration(BaseModel):
    """A length of training in optimizer steps, samples or tokens: "100 steps", "1e6 tokens", or 100
    (steps)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    amount: float = Field(ge=0, le=1e18)
    unit: Unit = "steps"

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return value
        amount, _, unit = str(value).strip().partition(" ")
        unit = unit.strip().removesuffix("s") + "s" if unit else "steps"
        return {"amount": real(amount), "unit": unit}

    @model_serializer
    def __str__(self) -> str:
        amount = int(self.amount) if self.amount.is_integer() else self.amount
        return f"{amount} {self.unit.removesuffix('s') if amount == 1 else self.unit}"

    def __repr__(self) -> str:
        return repr(str(self))

    def scaled(self, factor: float) -> Duration:
        """Return this duration times `factor`."""
        return Duration(amount=self.amount * factor, unit=self.unit)

    def count(self, progress: Progress) -> int:
        """Return the count of `progress` in this duration's unit."""
        return int(getattr(progress, self.unit))

    def reached(self, progress: Progress) -> bool:
        return self.count(progress) >= self.amount

    def due(self, before: Progress, after: Progress) -> bool:
        """Whether a multiple of this duration was reached between two moments; for periodic actions."""
        return math.floor(self.count(after) / self.amount) > math.floor(self.count(before) / self.amount)


def real(value: object) -> object:
    """Return the value, a text that is a number as a float, since YAML 1.1 reads 3e-4 as text. Raises
    ValueError for true and false."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return not_bool(value)


def not_bool(value: object) -> object:
    """Return the value. Raises ValueError for true and false, which pydantic would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value
