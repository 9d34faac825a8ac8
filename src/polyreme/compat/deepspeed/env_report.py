"""What DeepSpeed's `ds_report` prints: versions, devices, and which of its operations work."""

from __future__ import annotations

import argparse
import platform
import shutil

import torch

import polyreme
from polyreme.compat import finder
from polyreme.compat.deepspeed.accelerator import get_accelerator
from polyreme.compat.deepspeed.ops.op_builder import ALL_OPS


def op_report(verbose: bool = True) -> None:
    """Print each operation, and what does its work: nothing is compiled."""
    print("operation ".ljust(32, "."), "works by")
    for name, builder in sorted(ALL_OPS.items()):
        print(f"{name} ".ljust(32, "."), builder.INSTEAD or "[not available]")


def debug_report() -> None:
    """Print versions, the device, and the shared memory."""
    device = get_accelerator()
    print(f"python version ...... {platform.python_version()}")
    print(f"torch version ....... {torch.__version__}")
    print(f"deepspeed ........... {finder.VERSIONS['deepspeed']}, by Polyreme {polyreme.__version__}")
    print(f"accelerator ......... {device.device_name()}, {device.device_count()}")
    if torch.cuda.is_available():
        print(f"device .............. {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    try:
        print(f"shared memory ....... {human_readable_size(shutil.disk_usage('/dev/shm').total)}")
    except OSError:
        print("shared memory ....... no /dev/shm")


def human_readable_size(size: float) -> str:
    """Bytes in units of 1024."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TB"


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print both."""
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def cli_main() -> None:
    """`ds_report`: read the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hide_operator_status", action="store_true", help="print no operations")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    main(given.hide_operator_status, given.hide_errors_and_warnings)


if __name__ == "__main__":
    main()
