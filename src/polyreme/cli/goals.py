"""Options of `polyreme plan` for what is measured, what the best layout is, and what is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_MEASURED, _GOAL, _WRITTEN = (
    dict[str, Any](rich_help_panel=title, show_default=False)
    for title in ("What is measured", "What is best: the fastest, unless", "What is written")
)


@dataclass(frozen=True)
class Goals:
    """The user's wish; each field is an option of the command."""

    measure: Annotated[
        Path | None,
        typer.Option(
            "--measure", metavar="FILE", **_MEASURED,
            help="Measure this machine with -n ranks, or those of all ranks that were started, and describe "
            "it in a new FILE, which stands for --cluster.",
        ),
    ] = None  # fmt: skip
    measure_top: Annotated[
        int | None,
        typer.Option(
            "--measure-top", metavar="K", min=1, **_MEASURED,
            help="Run a few steps of the best K layouts on this machine.",
        ),
    ] = None  # fmt: skip
    cheapest: Annotated[
        bool,
        typer.Option("--cheapest", **_GOAL, help="Choose the number of ranks up to -n that costs least."),
    ] = False
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline", metavar="HOURS", min=0, **_GOAL,
            help="With --cheapest: the whole job takes no longer.",
        ),
    ] = None  # fmt: skip
    tokens: Annotated[
        float | None,
        typer.Option(
            "--tokens", metavar="N", min=1, **_GOAL | {"show_default": "those of train.length"},
            help="With --cheapest: the tokens of the whole job, such as 1e12.",
        ),
    ] = None  # fmt: skip

    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="FILE", **_WRITTEN,
            help="The config with what was chosen; never over another file.",
        ),
    ] = None  # fmt: skip
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", **_WRITTEN, help="The plan as one page for a browser."),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", **_WRITTEN, help="The simulated step as a trace for Perfetto, in JSON."
        ),
    ] = None

    def check(self) -> None:
        """Raise a usage error for options that do nothing together."""
        for name, given in (("--deadline", self.deadline), ("--tokens", self.tokens)):
            if given is not None and not self.cheapest:
                raise typer.BadParameter("it applies with --cheapest only", param_hint=name)
