"""`python -m polyreme` is the command `polyreme`."""

from polyreme.cli import main

if __name__ == "__main__":
    main()
