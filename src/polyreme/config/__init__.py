"""The one configuration of a run: `Config`, typed and documented key by key.

Invariant: a `Config` has no unknown key and no value of a wrong type or range; one that `resolve` returned
also fits its world size, and every "auto" in it has its value. Pure: no process group.
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

__all__ = ["MOST_RANKS", "Config", "Duration", "LRScheduleSection", "Progress"]

SEARCHED = (
    "mesh.tp", "mesh.pp", "mesh.cp", "pipeline.virtual",
    "memory.states", "memory.params", "memory.activations",
)  # fmt: skip
"""Keys whose "auto" only a search over whole configs can replace (`polyreme.planner.search`)."""


class Config(Keys):
    """Everything about a run; every key has a default. Build it with `Config.load`."""

    # Key -> (its value before, the value that `resolve` chose): to undo `resolve`.
    _derived: dict[str, tuple[object, object]] = PrivateAttr(default_factory=dict)
    # The most samples of a micro-batch that fit in memory, for `resolve`; see `fitted`.
    _fits: int | None = PrivateAttr(default=None)
    # The keys of SEARCHED that are "auto", with their defaults meanwhile; and what a search chose.
    _open: tuple[str, ...] = PrivateAttr(default=())
    _chosen: dict[str, object] = PrivateAttr(default_factory=dict)

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
            _put(tree, dict.fromkeys(source._open, "auto"))
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
        searched = _take_searched(tree)
        if not (strange := list(unusable(tree))):
            try:
                config = cls.model_validate(tree)
            except ValidationError as error:
                problems += problems_of(error, tree)
        problems += strange
        if problems:
            raise ConfigError([theirs] if (theirs := of_deepspeed(tree, name)) else problems, name)
        config._open = searched
        return config

    @property
    def origins(self) -> dict[str, Literal["user", "default", "derived"]]:
        """The origin of each value, by dotted key."""
        return {key: self._origin(key) for key in LEAVES}

    @property
    def searched(self) -> tuple[str, ...]:
        """The keys that are "auto" and that only a search replaces; their values are the defaults till
        then."""
        return self._open

    def chosen(self, values: Mapping[str, object]) -> Config:
        """Return this config, before `resolve`, with what a search chose: values by dotted key, which count
        as derived, and as set where the config is written."""
        config = self._unresolved()._replaced(values)
        for section, _, name in (key.rpartition(".") for key in values):
            getattr(config, section).model_fields_set.add(name)
            config.model_fields_set.add(section)
        config._open, config._chosen = (), {**self._chosen, **values}
        return config

    def _origin(self, key: str) -> Literal["user", "default", "derived"]:
        if self._chosen.get(key, _NONE) == self.value(key):
            return "derived"
        if key in self._derived and self._derived[key][1] == self.value(key):
            return "derived"
        section, _, name = key.rpartition(".")
        owner = getattr(self, section) if section else self
        return "user" if name in owner.model_fields_set else "default"

    def problems(self, world_size: int) -> list[Problem]:
        """List every conflict between keys, and with `world_size` ranks; empty where the config can run."""
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
        """Return this config for `world_size` ranks, every "auto" replaced. Raises ConfigError with every
        problem.

        A resolved config can be resolved again, for the same or another world size.
        """
        if problems := self.problems(world_size):
            raise ConfigError(problems)
        if self._open:
            raise ConfigError([Problem(key, "auto", *_UNCHOSEN) for key in self._open])
        config = self._unresolved()
        derived = derive(config, world_size, self._fits)
        resolved = config._replaced(derived)
        resolved._derived = {key: (config.value(key), value) for key, value in derived.items()}
        return resolved

    def settled(self, world_size: int) -> Config:
        """Return this config for `world_size` ranks, as `resolve` does; or as it is, where a search comes
        first."""
        return self if self._open else self.resolve(world_size)

    def fitted(self, micro: int) -> Config:
        """Return this resolved config with micro-batches of at most `micro` samples, where `batch.micro` is
        "auto". Raises ConfigError where a step cannot have several micro-batches."""
        config, world_size = self._replaced({}), math.prod(self.axes.values())
        config._fits = micro
        if micro >= int(self.batch.micro):
            return config
        config = config.resolve(world_size)
        if problems := self._replaced({"batch.micro": config.batch.micro}).problems(world_size):
            raise ConfigError(problems)
        return config

    def of_accumulation(self, count: int) -> Config:
        """Return this resolved config with steps of so many micro-batches, which are as large."""
        micro = self._resolved("batch.micro")
        size = count * micro * self.data_parallel
        return self._replaced({"batch.micro": micro, "batch.size": size})

    def recut(self, fitted: Config) -> None:
        """Take over, in place, the micro-batches of `fitted`, which was made of this config, so that all
        holders of this config see them."""
        self.__dict__.update(batch=fitted.batch)
        self._derived, self._fits = fitted._derived, fitted._fits

    @property
    def fits(self) -> int | None:
        """The most samples of a micro-batch that fit, given to `fitted`; None before."""
        return self._fits

    @property
    def leaves_micro(self) -> bool:
        """Whether `resolve` chose micro-batches of several samples, and it is not known yet that they fit."""
        return self._fits is None and self.batch.micro != 1 and self._origin("batch.micro") == "derived"

    @property
    def computes_attention(self) -> bool:
        """Whether the engine computes attention: over mesh.cp, by a context.method, or for data.pack."""
        return self.mesh.cp > 1 or self.context.method != "auto" or self.data.pack

    @property
    def axes(self) -> dict[str, int]:
        """The size of each axis of the mesh. Raises ConfigError before `resolve`."""
        return {name: self._resolved(f"mesh.{name}") for name in AXES}

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel ranks. Raises ConfigError before `resolve`."""
        return self._resolved("mesh.dp")

    @property
    def share(self) -> int:
        """The samples of a global batch on one rank. Raises ConfigError before `resolve`."""
        return self.batch.size // self.data_parallel

    @property
    def accumulation(self) -> int:
        """The micro-batches of one optimizer step on one rank. Raises ConfigError before `resolve`."""
        return self.share // self._resolved("batch.micro")

    def _resolved(self, key: str) -> int:
        if (value := self.value(key)) == "auto":
            raise ConfigError(
                [Problem(key, "auto", "not known before the world size is", "call resolve(world_size)")]
            )
        return int(value)

    def steps(self, length: Duration) -> int:
        """Return `length` in whole optimizer steps, for samples of `data.sequence` tokens."""
        return math.ceil(samples(self, length) / self.batch.size)

    def _unresolved(self) -> Config:
        """Return the config before `resolve`, except for values that were changed since."""
        given = {key: before for key, (before, after) in self._derived.items() if self.value(key) == after}
        config = self._replaced(given)
        config._derived = {}
        return config

    def _replaced(self, values: Mapping[str, object]) -> Config:
        """Return a copy with other values, in which keys set by the user are still known as such."""
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


_NONE = object()
_UNCHOSEN = (
    "only a search over the memory and time of whole runs replaces it, as polyreme train and "
    "polyreme.initialize make one",
    "run polyreme plan CONFIG --write FILE, and take that file",
)


def _take_searched(tree: dict[str, Any]) -> tuple[str, ...]:
    """Take the keys of SEARCHED that are "auto" out of `tree`, and return them."""
    found = []
    for key in SEARCHED:
        section, _, name = key.partition(".")
        if isinstance(table := tree.get(section), dict) and table.get(name) == "auto":
            tree[section] = {each: value for each, value in table.items() if each != name}
            found.append(key)
    return tuple(found)


def _put(tree: dict[str, Any], values: Mapping[str, object]) -> None:
    """Set values by dotted key."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
