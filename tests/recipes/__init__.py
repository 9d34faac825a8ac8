"""The plain PyTorch twins of examples/recipes, by the same names: each module's `plain()` returns the losses
of one process."""
