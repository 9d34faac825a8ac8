"""`python -m polyreme` is the command `polyreme`."""

import os
import sys

from polyreme.launch.processes import leave
from polyreme.launch.signals import importing


def main() -> None:
    """The entry point."""
    if sys.getfilesystemencoding() == "ascii":  # a locale in which no file with another name can be opened
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    with importing():
        from polyreme.cli.main import main as command
    try:
        command()
    except KeyboardInterrupt:  # no command has begun, or it ends
        sys.exit(130)
    except SystemExit as end:
        if "polyreme.launch.torchrun" not in sys.modules or not isinstance(end.code, int):
            raise
        leave(end.code)  # whose ranks have ended: the prompt is waited for


if __name__ == "__main__":
    main()
