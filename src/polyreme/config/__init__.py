"""The one configuration of a run: `Config`, typed and documented key by key.

Invariant: a `Config` that exists has no unknown key and no value of a wrong type or range; one that `resolve`
returned also fits its world size, and every key left to us has its value. Pure: no process group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError

from polyreme.config.duration import Duration, Progress
from polyreme.config.loading import of_deepspeed, override, plain, problems_of, read, unusable
from polyreme.config.schema import LEAVES, Keys, LRScheduleSection
from polyreme.config.validate import MOST_RANKS, conflicts, derive, samples
from polyreme.errors import ConfigError, Problem
from polyreme.layout.mesh_axes import AXES

__all__ = ["MOST_RANKS", "Config", "LRScheduleSection", "Progress", "Span"]


class Config(Keys):
    """Everything about a run; every key has a default. Build it with `Config.load`."""

    # Key -> (what it was, what resolve chose): the way back to the config as it was written.
    _derived: dict[str, tuple[object, object]] = PrivateAttr(default_factory=dict)
    # The samples of a micro-batch that were found to fit, for `resolve`; see `fitted`.
    _fits: int | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
        """Read a config: a .toml, .yaml, .yml or .json file, a mapping, or another config.

        `overrides` are "section.key=value"; a value is read as TOML where it is TOML, else as plain text.
        Raises ConfigError that lists every unknown key and every wrong value.
        """
        if isinstance(source, Config):
            if not overrides:
                return source
            tree, name = source._unresolved().model_dump(exclude_unset=True), None
        elif isinstance(source, Mapping):
            try:
                tree, name = plain(source), None
            except ValueError as error:
                raise ConfigError(
                    [Problem("config", "a mapping", str(error), "give plain tables of values")]
                ) from None
        else:
            tree, name = read(source), str(source)
        problems = [p for text in overrides if (p := override(tree, text))]
        if not (strange := list(unusable(tree))):
            try:
                config = cls.model_validate(tree)
            except ValidationError as error:
                problems += problems_of(error, tree)
        problems += strange
        if problems:
            raise ConfigError([theirs] if (theirs := of_deepspeed(tree, name)) else problems, name)
        return config

    @property
    def origins(self) -> dict[str, Literal["user", "default", "derived"]]:
        """Where each value comes from, by dotted key."""
        return {key: self._origin(key) for key in LEAVES}

    def _origin(self, key: str) -> Literal["user", "default", "derived"]:
        if key in self._derived and self._derived[key][1] == self.value(key):
            return "derived"
        section, _, name = key.rpartition(".")
        owner = getattr(self, section) if section else self
        return "user" if name in owner.model_fields_set else "default"

    def problems(self, world_size: int) -> list[Problem]:
        """Every conflict of this config with itself and with `world_size` ranks; empty where it can run."""
        if (
            isinstance(world_size, bool)
            or not isinstance(world_size, int)
            or not 1 <= world_size <= MOST_RANKS
        ):
            reason, fix = f"must be an integer from 1 to {MOST_RANKS}", "start one rank or more"
            return [Problem("world size", world_size, reason, fix)]
        config = self._unresolved()
        return [
            Problem(key, config.value(key), reason, fix) for key, reason, fix in conflicts(config, world_size)
        ]

    def resolve(self, world_size: int) -> Config:
        """This config for `world_size` ranks, every "auto" replaced. Raises ConfigError with every problem.

        A resolved config can be resolved again, for the same or another world size.
        """
        if problems := self.problems(world_size):
            raise ConfigError(problems)
        config = self._unresolved()
        derived = derive(config, world_size, self._fits)
        resolved = config._replaced(derived)
        resolved._derived = {key: (config.value(key), value) for key, value in derived.items()}
        return resolved

    def fitted(self, micro: int) -> Config:
        """This resolved config with micro-batches of at most `micro` samples, where they are left to us.
        Raises ConfigError where a step cannot have several."""
        config, world_size = self._replaced({}), math.prod(self.axes.values())
        config._fits = micro
        if micro >= int(self.batch.micro):
            return config
        config = config.resolve(world_size)
        if problems := self._replaced({"batch.micro": config.batch.micro}).problems(world_size):
            raise ConfigError(problems)
        return config

    def recut(self, fitted: Config) -> None:
        """Have the micro-batches of `fitted`, which was made of this config: so has all that has it."""
        self.__dict__.update(batch=fitted.batch)
        self._derived, self._fits = fitted._derived, fitted._fits

    @property
    def fits(self) -> int | None:
        """What `fitted` was told."""
        return self._fits

    @property
    def leaves_micro(self) -> bool:
        """Whether `resolve` chose micro-batches of several samples, of which is not known that they fit."""
        return self._fits is None and self.batch.micro != 1 and self._origin("batch.micro") == "derived"

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis of the mesh. Raises ConfigError before `resolve`."""
        return {name: self._resolved(f"mesh.{name}") for name in AXES}

    @property
    def data_parallel(self) -> int:
        """How many ranks have other samples. Raises ConfigError before `resolve`."""
        return self._resolved("mesh.dp")

    @property
    def share(self) -> int:
        """Samples of a global batch on one rank. Raises ConfigError before `resolve`."""
        return self.batch.size // self.data_parallel

    @property
    def accumulation(self) -> int:
        """Micro-batches of one optimizer step on one rank. Raises ConfigError before `resolve`."""
        return self.share // self._resolved("batch.micro")

    def _resolved(self, key: str) -> int:
        if (value := self.value(key)) == "auto":
            raise ConfigError(
                [Problem(key, "auto", "not known before the world size is", "call resolve(world_size)")]
            )
        return int(value)

    def steps(self, length: Duration) -> int:
        """`length` in whole optimizer steps, taking every sample as full (`data.sequence` tokens)."""
        return math.ceil(samples(self, length) / self.batch.size)

    def _unresolved(self) -> Config:
        """Undo `resolve`, except for values that were changed since."""
        given = {key: before for key, (before, after) in self._derived.items() if self.value(key) == after}
        config = self._replaced(given)
        config._derived = {}
        return config

    def _replaced(self, values: Mapping[str, object]) -> Config:
        """A copy with other values, each key still remembered as set by the user or not."""
        sections: dict[str, Any] = {}
        for key, value in values.items():
            name, _, leaf = key.partition(".")
            old = sections.get(name, getattr(self, name))
            fields = {**dict(old), leaf: value}
            sections[name] = type(old).model_construct(_fields_set=set(old.model_fields_set), **fields)
        config = self.model_copy()
        config.__dict__.update(sections)  # frozen for users; the copy is not shared yet
        config._derived = dict(self._derived)
        return config
