"""Which Polyreme this is; `pyproject.toml` has the same number."""

VERSION = "0.1.0"
