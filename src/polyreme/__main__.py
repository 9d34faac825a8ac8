"""`python -m polyreme` is the command `polyreme`."""

import sys

from polyreme.launch.signals import importing


def main() -> None:
    """The entry point."""
    with importing():
        from polyreme.cli.main import main as command
    try:
        command()
    except KeyboardInterrupt:  # no command has begun, or it ends
        sys.exit(130)


if __name__ == "__main__":
    main()
