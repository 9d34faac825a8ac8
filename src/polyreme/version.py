"""The version of Polyreme; `pyproject.toml` has the same number."""

VERSION = "0.1.0"
