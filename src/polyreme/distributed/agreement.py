"""Compare what has to be the same on all ranks before anything depends on it: the config and the versions of
what computes before the mesh is made, the model before its numbers move.

Invariant: where ranks differ, or one of them fails to make what is compared, every rank raises, and none
waits for another.
Communication: one exchange of a digest, and where ranks differ, one of all that was compared."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any, Protocol, TypeVar

from torch import nn

from polyreme.config.schema import LEAVES
from polyreme.distributed.mesh import Axis
from polyreme.distributed.versions import refuse_unlike, versions
from polyreme.errors import ConfigError, LaunchError, ModelError, PolyremeError, Problem, ranks_named

OF_A_RANK = ("data.", "monitor.", "launch.", "model.path", "checkpoint.folder", "checkpoint.resume")
"""Prefixes of config keys that may differ between ranks: where files are on a rank's host, and what it
shows."""
SHOWN = 8
"""Most differences that an error lists."""

T = TypeVar("T")
Difference = tuple[str, Any, str]
"""A key, rank 0's value, and a text of which ranks have which value."""


class Keyed(Protocol):
    """A config: the value of each key, by its dotted name, and the keys that a search has to replace."""

    @property
    def searched(self) -> Sequence[str]:
        """The keys whose values are not theirs yet."""

    def value(self, key: str) -> Any:
        """Return the value of `key`."""


Settings = TypeVar("Settings", bound=Keyed)


def same_config(everyone: Axis, load: Callable[[], Settings]) -> Settings:
    """Return the config after comparing it over all ranks. Raises ConfigError on every rank, with each key
    that differs. Where a rank could not read it, raises that error there and LaunchError on the others.
    Raises LaunchError first where versions differ."""

    def facts(config: Settings) -> dict[str, Any]:
        found = {key: _comparable(key, config.value(key)) for key in LEAVES if not key.startswith(OF_A_RANK)}
        return found | dict.fromkeys(config.searched, "auto")

    return _same(everyone, load, facts, "could not read its config", _configs_differ, versions)


def same_model(everyone: Axis, module: nn.Module, others: Mapping[str, object]) -> None:
    """Compare the model's structure, not its numbers, and `others` by name. Raises ModelError on every rank,
    with all differences."""
    _same(
        everyone,
        lambda: None,
        lambda _: {**_model_facts(module), **{key: _plain(each) for key, each in others.items()}},
        "could not make its model",
        _models_differ,
    )


def same_scheduler(everyone: Axis, state: Mapping[str, object]) -> None:
    """Compare the state of a torch scheduler. Raises ModelError on every rank, with all differences."""
    _same(
        everyone,
        lambda: None,
        lambda _: {f"lr_scheduler {key}": _plain(value) for key, value in state.items()},
        "could not make its lr_scheduler",
        _models_differ,
    )


def known_as(given: object) -> str | None:
    """Return a text that identifies a function, a class or a callable object on every rank: its name, and a
    digest of its Python code. Variables that it closes over may differ, such as a rank's number for its
    log."""
    if given is None:
        return None
    while isinstance(given, partial):
        given = given.func
    function = inspect.unwrap(given) if callable(given) else given
    named = function if hasattr(function, "__qualname__") else type(function)
    name = f"{named.__module__}.{named.__qualname__}".replace("__mp_main__", "__main__")
    code = getattr(function, "__code__", None)
    return (
        name
        if code is None
        else f"{name} (code {hashlib.sha256(repr(_code(code)).encode()).hexdigest()[:8]})"
    )


def _code(code: CodeType) -> tuple[object, ...]:
    """Return the code of a function without file names and line numbers."""
    constants = [
        _code(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def _same(
    everyone: Axis,
    make: Callable[[], T],
    facts_of: Callable[[T], dict[str, Any]],
    could_not: str,
    differ: Callable[[list[Difference]], PolyremeError],
    versions: Callable[[], Mapping[str, str]] = dict,
) -> T:
    if everyone.size == 1:
        return make()
    failure: Exception | None = None
    facts: dict[str, Any] = {}
    try:
        made = make()
        facts = facts_of(made)
    except Exception as error:  # whatever it is, the others must not wait for this rank
        failure = error
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    report = [digest, str(failure) if failure else None, socket.gethostname(), versions()]
    reports: list[Any] = everyone.gather_objects(report)
    refuse_unlike(each[2:] for each in reports)
    if failure is not None:
        raise failure
    for rank, (_, why, *_) in enumerate(reports):
        if why is not None:
            raise LaunchError(f"rank {rank} {could_not}: {why}")
    if len({each[0] for each in reports}) > 1:
        raise differ(list(_differences(everyone.gather_objects(facts))))
    return made


def _differences(by_rank: list[Any]) -> Iterator[Difference]:
    keys = dict.fromkeys(key for facts in by_rank for key in facts)
    for key in keys:
        who: dict[str, list[int]] = {}
        for rank, facts in enumerate(by_rank):
            who.setdefault(json.dumps(facts[key]) if key in facts else "nothing", []).append(rank)
        if len(who) > 1:
            yield (
                key,
                by_rank[0].get(key),
                ", ".join(f"{value} on {ranks_named(ranks)}" for value, ranks in who.items()),
            )


def _configs_differ(differences: list[Difference]) -> ConfigError:
    return ConfigError(
        [
            Problem(key, value, f"ranks have different ones: {who}", "give every rank the same")
            for key, value, who in differences
        ]
    )


def _models_differ(differences: list[Difference]) -> ModelError:
    lines = [f"\n  - {key}: {who}" for key, _, who in differences[:SHOWN]]
    more = f"\n  and {len(differences) - SHOWN} more" * (len(differences) > SHOWN)
    return ModelError(
        "the ranks were given different models, but train one "
        f"together: give every rank the same{''.join(lines)}{more}"
    )


def _comparable(key: str, value: object) -> Any:
    """Return a value as JSON has it. Folders under `memory` become "files", as each host has folders of its
    own."""
    if key.startswith("memory."):
        names = value if isinstance(value, list) else [value]
        value = [
            "files"
            if isinstance(each, str) and ("/" in each or "\\" in each or each.startswith("~"))
            else each
            for each in names
        ]
    return _plain(value)


def _model_facts(module: nn.Module) -> dict[str, Any]:
    """Return facts by name: the class of the model, and of each of its tensors the shape, the dtype and
    whether it is trained."""
    facts: dict[str, Any] = {"model": type(module).__name__}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        facts[name] = (
            f"{tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"
        )
    facts.update(
        {
            name: f"{tuple(buffer.shape)} {buffer.dtype}"
            for name, buffer in module.named_buffers(remove_duplicate=False)
        }
    )
    return facts


def _plain(value: object) -> Any:
    """Return a value as JSON has it; what JSON cannot hold as its text, without addresses in memory."""
    return json.loads(json.dumps(value, default=lambda each: re.sub(" at 0x[0-9a-f]+", "", str(each))))
