"""DeepSpeed's converter to universal checkpoints, which load on any number of ranks and at any stage. Here
every checkpoint does: the output is a copy of the input."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.compat.deepspeed.refusal import ArgumentError
from polyreme.compat.deepspeed.saving import LATEST_UNIVERSAL, replace_text


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """DeepSpeed's arguments. Those about workers, temporary files and checks change nothing."""
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
    """Make `args.output_folder`, and beside it the file `latest_universal`, which `load_checkpoint` without a
    tag reads where the config has `checkpoint.load_universal`.

    Raises ArgumentError where the input is no folder, or the output is there."""
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
