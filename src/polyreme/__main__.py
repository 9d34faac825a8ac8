"""`python -m polyreme` is the command `polyreme`."""

import os
import sys

from polyreme.launch.processes import leave
from polyreme.launch.signals import importing


def main() -> None:
    """Run the command."""
    if sys.getfilesystemencoding() == "ascii":  # in this locale no file with a non-ASCII name can be opened
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    with importing():
        from polyreme.cli.main import main as command
    try:
        command()
    except KeyboardInterrupt:  # no command has begun, or one is ending
        sys.exit(130)
    except SystemExit as end:
        if "polyreme.launch.torchrun" not in sys.modules or not isinstance(end.code, int):
            raise
        leave(end.code)  # its ranks have ended, and the user waits for the prompt


if __name__ == "__main__":
    main()
