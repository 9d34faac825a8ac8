"""Errors that DeepSpeed's users catch by name."""

from polyreme.errors import PolyremeError


class DeprecatedException(PolyremeError):
    """A call that DeepSpeed has removed."""
