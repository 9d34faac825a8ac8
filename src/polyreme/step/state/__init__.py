"""The state of an engine between two steps, to a checkpoint and back."""
