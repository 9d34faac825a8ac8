"""The script's view of a step: calls, gradients and numbers."""
