"""Show a checkpoint to people and programs. Rendering only: facts come from `polyreme.checkpoint`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group
from rich.progress import track
from rich.table import Table
from rich.text import Text

from polyreme.checkpoint.listing import Listing, Row, listing
from polyreme.cli.folding import Folded, binary, count, some
from polyreme.errors import printable

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
OF_LOSS_SCALE = ("loss_scale", "good_steps", "overflows", "hint")
"""Fields of a checkpoint's state that only JSON shows where losses are not scaled."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between dots


def show(path: Path, as_json: bool) -> None:
    """Print the contents of a checkpoint, and exit with status 1 where it is damaged."""
    errors = Console(stderr=True)
    found = listing(
        path,
        lambda shares: track(
            range(shares), "comparing checksums", console=errors, transient=True, disable=shares == 1
        ),
    )
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        Console().print(render(found))
    if found.problem:
        raise typer.Exit(1)


def render(found: Listing) -> Group:
    """Return the contents of a checkpoint as tables: how it was written, sizes by kind, and tensors. Tensors
    of blocks that differ only by numbers in their names share a line."""
    top = Table.grid(padding=(0, 2))
    for label, text in _summary(found):
        style = "bold red" if label == "damaged" else ""
        top.add_row(Text(label, style=style or "dim"), Text(printable(text), style=style, overflow="fold"))
    kinds = Table(title="by kind", title_justify="left")
    kinds.add_column("kind")
    for column in ("tensors", "elements", "size"):
        kinds.add_column(column, justify="right")
    kinds.add_column("dtype")
    for kind in found.kinds:
        dtypes = ", ".join(SHORT.get(dtype, dtype) for dtype in kind.dtypes)
        kinds.add_row(
            Text(printable(kind.name)), f"{kind.tensors:,}", f"{kind.elements:,}", binary(kind.bytes), dtypes
        )
    tensors = Table(title="tensors", title_justify="left")
    tensors.add_column("count", justify="right")
    tensors.add_column("name")
    tensors.add_column("shape", overflow="fold")
    tensors.add_column("dtype", overflow="fold")
    tensors.add_column("states", overflow="fold")
    every = [kind.name for kind in found.kinds if kind.name != "model"]
    for rows in _alike(found.tensors):
        first = rows[0].kinds.get("model") or next(iter(rows[0].kinds.values()))
        states = [kind for kind in rows[0].kinds if kind != "model"]
        shown = "all" if states == every else ", ".join(states) or "none"
        dtype = str(first.dtype).removeprefix("torch.")
        name = _common_name([row.name for row in rows]) + (f" = {rows[0].same_as}" if rows[0].same_as else "")
        shape = "x".join(map(str, first.shape)) or "()"
        tensors.add_row(
            str(len(rows)),
            Folded(printable(name)),
            shape,
            SHORT.get(dtype, dtype),
            *([Text(printable(shown))] if every else []),
        )
    if not every:
        tensors.columns.pop()
    return Group(top, kinds, tensors)


def _summary(found: Listing) -> list[tuple[str, str]]:
    lines = [("checkpoint", str(found.path)), ("format", found.format)]
    if found.mesh:
        axes = [f"{name} {size}" for name, size in found.mesh.items() if size > 1 and name != "ranks"]
        ranks = f"{count(prod(found.mesh.values()), 'rank')}{': ' if axes else ''}{' x '.join(axes)}"
        lines.append(
            (
                "written by",
                ranks + (f", ZeRO stage {found.zero_stage}" if found.zero_stage is not None else ""),
            )
        )
    scaled = found.state.get("loss_scale", 1) != 1  # the fields of loss scaling mean nothing otherwise
    state = {name: value for name, value in found.state.items() if scaled or name not in OF_LOSS_SCALE}
    lines += [
        (label, _values(values))
        for label, values in (("state", state), ("versions", found.versions))
        if _values(values)
    ]
    if found.others:
        lines.append(("not read", some(list(found.others), ", ")))
    if found.problem:
        lines.append(("damaged", found.problem))
    elif found.checksums:
        lines.append(("integrity", f"whole: all {found.checksums:,} checksums are as written"))
    else:
        lines.append(("integrity", "the files have their sizes; there are no checksums"))
    return lines


def _values(values: Mapping[str, Any]) -> str:
    """Return the numbers and words among the values as text."""
    shown = []
    for name, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            shown.append(f"{name} {value:,}")
        elif isinstance(value, float | str):
            shown.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(shown)


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Group tensors that differ only by numbers in their names, in the order of each group's first."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        kinds = tuple((kind, info.shape, info.dtype) for kind, info in row.kinds.items())
        groups.setdefault((NUMBER.sub("#", row.name), kinds, row.same_as), []).append(row)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    """Return one name for names that differ only by numbers: "layers.{0-31}.weight"."""
    columns = iter(
        sorted({int(number) for number in numbers})
        for numbers in zip(*map(NUMBER.findall, names), strict=True)
    )

    def column(_: re.Match[str]) -> str:
        numbers = next(columns)
        if len(numbers) == 1:
            return str(numbers[0])
        dense = numbers[-1] - numbers[0] == len(numbers) - 1
        return (
            "{"
            + (f"{numbers[0]}-{numbers[-1]}" if dense else some([str(number) for number in numbers], ","))
            + "}"
        )

    return NUMBER.sub(column, names[0])
