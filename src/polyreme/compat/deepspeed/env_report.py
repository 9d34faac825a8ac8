"""The command `ds_report`, which prints versions, the device, and what does the work of each of DeepSpeed's
operations."""

from __future__ import annotations

import argparse
import platform
import shutil
from pathlib import Path

import torch

import polyreme
from polyreme.compat import finder
from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.ops.op_builder import ALL_OPS


def op_report(verbose: bool = True) -> None:
    """Print for each of DeepSpeed's compiled operations what does its work here."""
    print("operation ".ljust(32, "."), "works by")
    for name, builder in sorted(ALL_OPS.items()):
        print(f"{name} ".ljust(32, "."), builder.INSTEAD or "[not available]")


def debug_report() -> None:
    """Print the versions, the device, and the size of the shared memory."""
    device = get_accelerator()
    print(f"python version ...... {platform.python_version()}")
    print(f"torch version ....... {torch.__version__}")
    print(f"deepspeed ........... {finder.VERSIONS['deepspeed']}, by Polyreme {polyreme.__version__}")
    print(f"accelerator ......... {device.device_name()}, {device.device_count()}")
    if torch.cuda.is_available():
        print(f"device .............. {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    if Path("/dev/shm").is_dir():
        print(f"shared memory ....... {shutil.disk_usage('/dev/shm').total / 2**30:.2f} GiB")


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the operations, unless they are hidden, and the versions."""
    for report in (debug_report,) if hide_operator_status else (op_report, debug_report):
        report()


def cli_main() -> None:
    """Read the arguments of `ds_report`, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hide_operator_status", action="store_true", help="print no operations")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
