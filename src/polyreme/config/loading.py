"""Loads a config: reads plain tables from a file, a mapping and overrides, and turns pydantic's errors into
problems that a user can act on."""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyreme.config.describe import HUGE, example, expects, toml
from polyreme.config.repair import LONGEST as LONGEST_WORD
from polyreme.config.repair import meant
from polyreme.config.schema import LEAVES, SECTIONS, Section, expanded
from polyreme.errors import ConfigError, Problem, shortened

FILE_LIMIT = 4 << 20
"""The most bytes of a config file."""
DEEPSPEED = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization", "gradient_clipping", "bf16", "fp16"),
}
"""DeepSpeed's keys, of which two make a config one of DeepSpeed's."""
LONGEST = 1024
"""The most bits of an integer."""
COMPARED = 50
"""The most unknown keys for which the nearest known key is found."""
VALUES, LEVELS = 100_000, 64
"""The most keys and values of a config, and the most levels of nesting."""


def plain(source: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a mapping, so that overrides may change it, with sections as dicts; null for a section (an empty
    one in YAML) becomes an empty dict."""

    check_bounds(source, members)

    def copied(value: Any) -> Any:
        if isinstance(value, Section):
            return value.model_dump(exclude_unset=True)
        return {k: copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    return {key: {} if value is None and key in SECTIONS else copied(value) for key, value in source.items()}


def read(source: str | Path, what: str = "config") -> dict[str, Any]:
    """Read the tables of a file. what: it is, for messages. Raises ConfigError where it cannot be read or
    parsed."""

    def failed(reason: str, fix: str) -> ConfigError:
        return ConfigError([Problem(what, str(source), reason, fix)])

    if not isinstance(source, str | os.PathLike):
        raise failed(f"it is a {type(source).__name__}", "give the path of a file, or a mapping")

    try:
        path = Path(expanded(str(source)))
        if not path.exists():
            raise failed("there is no such file", f"check the path; it is taken from {working_folder()}")
        suffix = path.suffix.lower()
        if suffix not in (".toml", ".yaml", ".yml", ".json"):
            raise failed(
                f"cannot tell its format from the suffix {suffix!r}", "use a .toml, .yaml, .yml or .json file"
            )
        text = text_of(path)
    except (OSError, ValueError) as error:
        raise failed(
            f"cannot be read: {getattr(error, 'strerror', None) or error}",
            "give a readable text file in UTF-8",
        ) from None
    try:
        tree = _parse(text, suffix)
        if isinstance(tree, dict | None):
            return plain(tree or {})
    except (ValueError, RecursionError) as error:
        raise failed(f"not valid {suffix[1:].upper()}: {error}", "correct the file at that place") from None
    raise failed(f"holds {_named(tree)}, not a table of keys", "write keys and values at the top level")


def of_deepspeed(tree: Mapping[str, Any], file: str | None) -> Problem | None:
    """Return the problem that the config is one of DeepSpeed's; None if it is not."""
    if len(tree.keys() & DEEPSPEED) < 2:
        return None
    fix = (
        f"write one of Polyreme's of it: polyreme inspect {file or 'ds.json'} -n RANKS --write run.toml; "
        "a script that gives it to DeepSpeed runs as it is: polyreme launch --deepspeed -n RANKS SCRIPT"
    )
    return Problem("config", file or "a mapping", "it is a config of DeepSpeed's", fix)


def working_folder() -> str:
    """Return the working folder, for messages; it may have been deleted."""
    try:
        return str(Path.cwd())
    except OSError:
        return "the working folder, which has been deleted"


def text_of(path: Path) -> str:
    """Read a text file in UTF-8. Raises OSError, and ValueError for a file that is not regular, or longer
    than FILE_LIMIT; never waits for the writer of a pipe."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(FILE_LIMIT + 1)
    if len(content) > FILE_LIMIT:
        raise ValueError(f"it is longer than {FILE_LIMIT:,} bytes, and no config is")
    return content.decode("utf-8-sig")


def _parse(text: str, suffix: str) -> object:
    """Parse `text` in the format of `suffix`. Raises ValueError where it is not valid, or a key comes twice,
    as parsers differ in which one counts."""
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text, object_pairs_hook=distinct)
    import yaml

    class Loader(yaml.SafeLoader):
        """Checks the size of a document before it is built: aliases of a few bytes can stand for any number
        of values."""

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            distinct([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return node

        def construct_document(self, node: yaml.Node) -> Any:
            check_bounds(
                node,
                lambda each: (
                    each.value
                    if isinstance(each, yaml.CollectionNode)
                    else each
                    if type(each) is tuple
                    else ()
                ),
            )
            return super().construct_document(node)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of these pairs. Raises ValueError where a key comes twice, of which JSON would keep the
    last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} comes twice")
    return found


def check_bounds(root: object, children: Callable[[Any], Iterable[object]]) -> None:
    """Raise ValueError where there are more than LEVELS levels, or more than VALUES values, below `root`. A
    value counts as often as it is referred to."""
    left, level = VALUES, [root]
    for _ in range(LEVELS):
        level = list(islice(chain.from_iterable(map(children, level)), left + 1))
        left -= len(level)
        if left < 0:
            raise ValueError(
                f"it holds more than {VALUES:,} values (each alias counts as all that it stands for)"
            )
        if not level:
            return
    raise ValueError(f"it is nested more than {LEVELS} levels deep")


def members(value: object) -> Iterable[object]:
    """Return the keys and values of a table, or the elements of a list; nothing for other values."""
    if isinstance(value, Section):
        return value.model_fields_set  # checked when it was made
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    return value if isinstance(value, list | tuple) else ()


def unusable(tree: object, key: str = "") -> Iterator[Problem]:
    """Report values anywhere in `tree` that a config cannot have: texts with a NUL or that UTF-8 cannot
    encode, too long integers, and types such as dates that only some formats have."""
    below = (
        tree.items()
        if isinstance(tree, Mapping)
        else enumerate(tree)
        if isinstance(tree, list | tuple)
        else ()
    )
    for name, value in below:
        path = f"{key}.{name}" if key else str(name)
        yield from unusable(value, path)
        if isinstance(name, str) and not _is_text(name):
            yield Problem(
                key or "config",
                name,
                "a key has a character that is no text (a NUL, or half of a pair)",
                "write text in UTF-8",
            )
    if isinstance(tree, str) and not _is_text(tree):
        yield Problem(
            key, tree, "it has a character that is no text (a NUL, or half of a pair)", "write text in UTF-8"
        )
    elif isinstance(tree, int) and tree.bit_length() > LONGEST:
        yield Problem(key, tree, "no number of a config is so long", "write a shorter one")
    elif isinstance(tree, date | time | bytes | set):
        yield Problem(
            key,
            tree,
            f"must be text, a number, true or false, a list or a table, not {_named(tree)}",
            "write it in quotes",
        )


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def override(tree: dict[str, Any], text: str) -> Problem | None:
    """Write one "section.key=value" into `tree`. Returns the problem if that cannot be done."""
    key, equals, raw = text.partition("=")
    path = [word.strip() for word in key.split(".")]
    if not equals or not all(path) or len(path) > LEVELS:
        return Problem(
            "override", text, "not of the form section.key=value", 'write for example "optimizer.lr=1e-3"'
        )
    try:
        parsed = tomllib.loads(f"value = {raw.strip()}")
        check_bounds(parsed, members)
    except (ValueError, RecursionError):  # not TOML, or too long numbers or too deep nesting
        parsed = {}
    # A date is taken as text; a line break could have brought in more keys.
    is_value = list(parsed) == ["value"] and isinstance(
        parsed["value"], bool | int | float | str | list | dict
    )
    table = tree
    for depth, word in enumerate(path[:-1], 1):
        table = table.setdefault(word, {})
        if not isinstance(table, dict):
            return Problem(
                ".".join(path[:depth]), table, f"not a table, so {key.strip()} cannot be set", "remove it"
            )
    table[path[-1]] = parsed["value"] if is_value else raw.strip()
    return None


def problems_of(error: ValidationError, tree: Mapping[str, Any]) -> list[Problem]:
    """Return one problem for each wrong key of `tree`. (Pydantic reports each member of a union.)"""
    problems: dict[str, Problem] = {}
    unknown = 0
    for detail in error.errors(include_url=False):
        path = detail["loc"][: 1 if detail["loc"][0] in LEAVES else 2]
        key, found = ".".join(map(str, path)), detail["input"]
        if key in problems:
            continue
        if detail["type"] != "invalid_key":
            found = tree[str(path[0])] if len(path) == 1 else tree[str(path[0])][path[1]]
        if detail["type"] in ("extra_forbidden", "invalid_key") and key not in LEAVES:
            unknown += 1
            problems[key] = _unknown(key, found, compared=unknown <= COMPARED)
        elif key in LEAVES:
            field = LEAVES[key]
            reason = f"must be {expects(field)}, not {_named(found)}"
            if detail["type"] in ("axis_order", "home", "nothing"):
                reason = detail["msg"]
            elif detail["type"] == "less_than_equal" and detail["ctx"]["le"] >= HUGE:
                reason = f"must be at most {detail['ctx']['le']}"
            problems[key] = Problem(key, found, reason, f"write {key} = {toml(meant(key, field, found))}")
        else:
            keys = [k for k in LEAVES if k.startswith(f"{key}.")]
            fix = f"write for example {keys[0]} = {toml(example(LEAVES[keys[0]]))}"
            problems[key] = Problem(key, found, f"must be a table of keys, not {_named(found)}", fix)
    return list(problems.values())


ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(
        ("max_norm", "max_grad_norm", "clip_grad_norm", "grad_clip", "gradient_clipping"), "optimizer.clip"
    ),
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), "batch.size"),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"), "batch.micro"
    ),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "num_warmup_steps"), "lr_schedule.warmup"),
    "gradient_clip_val": "optimizer.clip",
    "optimizer.type": "optimizer.name",
    "lr_schedule.type": "lr_schedule.name",
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), "lr_schedule"),
    **dict.fromkeys(("max_steps", "train.steps"), "train.length"),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "dtype", "torch_dtype"), "precision.compute"),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"), "mesh.tp"),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "mesh.pipeline"), "mesh.pp"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "memory.activations"),
    **dict.fromkeys(("checkpoint.path", "output_dir", "save_dir"), "checkpoint.folder"),
}
"""Our keys by their names in other systems, in any section or, with a dot, in that one."""
EPOCHS = {"epochs", "num_epochs", "max_epochs", "num_train_epochs"}
"""Other systems' keys for a length of training in epochs."""
ACCUMULATION = {
    *("accumulation", "accumulation_steps", "gradient_accumulation", "gradient_accumulation_steps"),
    *("accumulate_grad_batches", "grad_accum", "batch.accum"),
}
"""Other systems' keys, and `Config.accumulation`, for the micro-batches of a step on one rank."""


def _unknown(key: str, value: object, compared: bool) -> Problem:
    """Return the problem of an unknown key. compared: find the nearest known key."""
    section, _, name = key.rpartition(".")

    def likeness(candidate: str) -> float:
        there, _, its_name = candidate.rpartition(".")
        alike = difflib.SequenceMatcher(None, name, its_name).ratio()
        if there == section:  # names of whole keys would be alike by the section alone
            return alike + 0.1
        return max(
            alike, difflib.SequenceMatcher(None, key.replace(".", "_"), candidate.replace(".", "_")).ratio()
        )

    if name in EPOCHS:
        fix = (
            'write train.length = "N samples", N being the number of epochs times that of samples in the data'
        )
        return Problem(key, value, "there is no such key, and no length in epochs", fix)
    if {key, name} & ACCUMULATION:
        fix = "write batch.micro = batch.size / (dp x N), N being the micro-batches of a step on each rank"
        return Problem(key, value, "there is no such key, as the sizes of batches say it", fix)
    if (meant := ELSEWHERE.get(key, ELSEWHERE.get(name))) is not None:
        return Problem(key, value, "there is no such key", f'did you mean "{meant}"?')
    if compared and len(key) <= LONGEST_WORD:
        best = max((candidate for candidate in [*LEAVES, *SECTIONS] if candidate != section), key=likeness)
        if likeness(best) >= 0.6:
            return Problem(key, value, "there is no such key", f'did you mean "{best}"?')
    valid = [k for k in LEAVES if k.startswith(f"{section}.")] if section else [*SECTIONS, "seed", "compile"]
    return Problem(key, value, "there is no such key", f"use one of {', '.join(valid)}")


def _named(value: object) -> str:
    if isinstance(value, int | float | str | list | tuple):
        return shortened(toml, value)
    return {dict: "a table", types.NoneType: "empty"}.get(type(value), type(value).__name__)
