"""Saves the options of an optimizer's groups, and a torch scheduler's state, in a checkpoint, and restores
them.

Invariant: a value that JSON can hold comes back equal and of its type; the keys of others are listed. No
communication."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OF_PARAMETERS = ("params", "param_names")
"""The keys of a group that are not options."""


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold, with tensors of one element as numbers."""
    found = {}
    for key, value in values.items():
        try:
            found[key] = json.loads(json.dumps(value, default=_number))
        except (TypeError, ValueError):
            continue
    return found


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that JSON can hold."""
    return plain({key: value for key, value in group.items() if key not in OF_PARAMETERS})


def lost(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of values that JSON cannot hold, but for functions, which a script makes again."""
    kept = {*plain(values), *OF_PARAMETERS}
    return [key for key, value in values.items() if key not in kept and not callable(value)]


def like(now: Any, saved: Any) -> Any:
    """Return `saved` in the type of `now`; in mappings, keys that only `now` has are kept."""
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    if isinstance(now, Counter):  # JSON has turned its keys into texts
        return Counter({int(key): count for key, count in saved.items()})
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        keys = {str(key): key for key in now}
        return {**now, **{keys.get(key, key): like(now.get(keys.get(key)), saved[key]) for key in saved}}
    if isinstance(now, list | tuple) and isinstance(saved, list):
        alike = len(now) == len(saved)
        return type(now)(map(like, now, saved) if alike else saved)
    return saved


def unlike(now: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return the first saved value whose type does not fit that of `now`, as `key = value`; empty if all fit.
    Both are `plain`."""
    return next((f"{k} = {v!r:.200}" for k, v in saved.items() if k in now and not _fits(now[k], v)), "")


def _fits(now: Any, saved: Any) -> bool:
    if isinstance(now, bool):
        return saved in (None, False, True)
    if isinstance(now, int | float):
        return isinstance(saved, int | float) and saved == saved  # no NaN
    if isinstance(now, list):
        alike = isinstance(saved, list) and len(saved) == len(now)
        return alike and all(map(_fits, now, saved))
    return not isinstance(now, Mapping) or isinstance(saved, Mapping)


OF_CLASS = "decoupled_weight_decay"
"""An option that turns one class into another: Adam with it is AdamW."""


@dataclass(frozen=True)
class Groups:
    """The options of all groups at one moment (`now`), and those that `initialize` made them with (`made`);
    both are `plain`."""

    now: Sequence[Mapping[str, Any]]
    made: Sequence[Mapping[str, Any]]


def restore_options(
    groups: Sequence[dict[str, Any]], made: Groups, saved: Groups, every: bool, rates: bool
) -> list[str]:
    """Set the options of `groups`, whose values are in `made`, to those in `saved`: `every` one, or only
    those that had been changed since they were made, and the others to the values they were made with here.
    Without `rates`, learning rates are not touched. Returns notes for the user."""
    changed: dict[str, list[int]] = {}
    for at, group in enumerate(groups):
        for key, value in _options_to_restore(made, saved, at, every, rates):
            before, others = made.now[at].get(key), (made.made[at].get(key), saved.made[at].get(key))
            set_here = key != "lr" and key in made.made[at] and before != others[0]
            if (
                key in made.now[at]
                and before != value
                and (set_here or (key in saved.made[at] and others[0] != others[1]))
            ):
                changed.setdefault(
                    f"{key} is {value!r}, as the checkpoint says, and not {before!r}", []
                ).append(at)
            put(group, {key: value})
    kept = [at for at in range(len(groups)) if _of_other_class(made, saved, at)]
    return [
        f"{what}, of the optimizer's group {_numbers(at)}: set it after load()"
        for what, at in changed.items()
    ] + [
        f"{OF_CLASS} is {made.now[kept[0]][OF_CLASS]}, as the optimizer was made here, and not "
        f"{saved.now[kept[0]][OF_CLASS]}, of the optimizer's group {_numbers(kept)}: it was saved with others"
        for _ in kept[:1]
    ]


def options_to_restore(made: Groups, saved: Groups, every: bool) -> list[dict[str, Any]]:
    """Return the options that `restore_options` would set, by group, without learning rates."""
    return [dict(_options_to_restore(made, saved, at, every, rates=False)) for at in range(len(made.now))]


def _of_other_class(made: Groups, saved: Groups, at: int) -> bool:
    """Whether the group was saved with another value of OF_CLASS than it was made with here."""
    if OF_CLASS not in made.now[at] or OF_CLASS not in saved.now[at]:
        return False
    then = saved.made[at].get(OF_CLASS, saved.now[at][OF_CLASS])
    return then != made.made[at].get(OF_CLASS) and saved.now[at][OF_CLASS] != made.now[at][OF_CLASS]


def _options_to_restore(
    made: Groups, saved: Groups, at: int, every: bool, rates: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the options to set for the group number `at`."""
    now, then, before = made.made[at], saved.now[at], saved.made[at]
    for key in {**then, **now}:
        if (key == "lr" and not rates) or (key == OF_CLASS and _of_other_class(made, saved, at)):
            continue
        if key in then and (every or key == "lr" or key not in before or then[key] != before[key]):
            yield key, then[key]
        elif key in now and not every:
            yield key, now[key]


def put(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Set options of a group, each in the type that it has there."""
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor):
            with torch.no_grad():
                group[key].fill_(value)
        elif key in group:
            group[key] = like(group[key], value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError


def _numbers(at: Sequence[int]) -> str:
    return ", ".join(map(str, at))
