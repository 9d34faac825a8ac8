"""DeepSpeed's command that converts a checkpoint to one that loads on any number of ranks and at any stage.
Every checkpoint does so here: the command copies it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.refusal import ArgumentError
from polyreme.compat.deepspeed.saving import LATEST_UNIVERSAL, replace_text


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments, which are DeepSpeed's. Those about workers, temporary files and checks change
    nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_folder", type=str, required=True, help="folder of one checkpoint")
    parser.add_argument("--output_folder", type=str, required=True, help="folder to make")
    for name, workers in (("extract", 4), ("merge", 2)):
        parser.add_argument(f"--num_{name}_workers", type=int, default=workers, help=argparse.SUPPRESS)
    parser.add_argument("--keep_temp_folder", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no_strict", dest="strict", action="store_false", help=argparse.SUPPRESS)
    parser.add_argument("--inject_missing_state", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(args: Any) -> None:
    """Copy `args.input_folder` to `args.output_folder`, and write its name into the file `latest_universal`
    beside it. `load_checkpoint` without a tag reads that file if the config has `checkpoint.load_universal`.

    Raises ArgumentError if the input is no folder, or the output exists."""
    source, target = Path(args.input_folder), Path(args.output_folder)
    if not source.is_dir():
        raise ArgumentError(
            f"input_folder {str(source)!r} is no folder: give that of one checkpoint, its tag's"
        )
    if target.exists():
        raise ArgumentError(f"output_folder {str(target)!r} is there: remove it, or give another name")
    shutil.copytree(source, target)
    replace_text(target.parent / LATEST_UNIVERSAL, target.name)


if __name__ == "__main__":
    main(parse_arguments())
