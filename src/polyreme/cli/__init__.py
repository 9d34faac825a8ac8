"""The command `polyreme`."""
