"""The checks of `polyreme doctor` for this machine.

Invariant: each check says what it found, and what is needed where it failed; none changes anything."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from polyreme.errors import LaunchError

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """A check of this machine; `found` is its text for people."""

    name: str
    ok: bool
    found: str


def show(check: Check, wide: int = 14) -> None:
    """Print a line of the table, with `wide` columns for names, wrapped to the width of the terminal."""
    import typer

    typer.secho("ok    " if check.ok else "fail  ", fg="green" if check.ok else "red", nl=False)
    indent = " " * (6 + wide)
    width = max(40, shutil.get_terminal_size().columns)
    text = textwrap.fill(
        check.found, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    typer.echo(f"{check.name:<{wide}}{text.lstrip()}")
    sys.stdout.flush()


def examine() -> Iterator[Check]:
    """Return all checks, in the order in which they are shown. Each is made when it is asked for."""
    checks: list[Callable[[], Check]] = [
        _python,
        _torch,
        _transformers,
        _cores,
        _memory,
        _disk,
        _accelerators,
        _bf16,
        _ranks,
    ]
    return (check() for check in checks)


def _python() -> Check:
    found = platform.python_version()
    enough = sys.version_info >= (3, 11)
    return Check(
        "python", enough, found if enough else f"{found}; install Python 3.11 or later, and Polyreme in it"
    )


def _torch() -> Check:
    import torch

    numbers = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    enough = numbers >= (2, 11)
    return Check(
        "torch", enough, torch.__version__ if enough else f"{torch.__version__}; pip install 'torch>=2.11'"
    )


def _transformers() -> Check:
    try:
        return Check("transformers", True, metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return Check(
            "transformers",
            True,
            "not installed, only Hugging Face models need it: pip install 'polyreme[hf]'",
        )


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", True, f"{usable} usable, {platform.machine()}")


def _memory() -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    enough = total >= 2 * GIB
    return Check(
        "memory",
        enough,
        f"{total / GIB:.1f} GiB"
        + ("" if enough else "; use a machine of 2 GiB or more, the least to train anything"),
    )


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    enough = free >= GIB
    return Check(
        "disk",
        enough,
        f"{free / GIB:.1f} GiB free here"
        + (
            ""
            if enough
            else "; make room, or change to a folder on another disk: checkpoints need 1 GiB or more"
        ),
    )


def _accelerators() -> Check:
    import torch

    count = torch.cuda.device_count()
    return Check(
        "accelerators",
        True,
        f"{count} x {torch.cuda.get_device_name(0)}" if count else "none, training uses the cores",
    )


def _bf16() -> Check:
    import torch

    from polyreme.planner.flops import peak_flops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ratio = peak_flops(device, torch.bfloat16).flops / peak_flops(device, torch.float32).flops
    advice = '; precision.compute = "fp32" trains faster here' if ratio < 1 else ""
    return Check("bf16", True, f"matrix products at {ratio:.2g} times the speed of fp32{advice}")


def _ranks() -> Check:
    from polyreme.launch.options import RanksFailedError
    from polyreme.launch.torchrun import launch

    try:
        launch(["-m", "polyreme.launch.probe"], ranks=2)
    except LaunchError as error:
        if isinstance(error, RanksFailedError) and error.rank is None:  # a signal of the user's ended them
            raise
        return Check(
            "ranks",
            False,
            f"two gloo ranks could not all-reduce: {error}; let "
            "processes of this host connect over loopback (127.0.0.1)",
        )
    return Check("ranks", True, "two gloo ranks all-reduced")
