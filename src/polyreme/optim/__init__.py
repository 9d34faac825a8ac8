"""Optimizers: parameter groups, learning rates, the kernels that update on a CPU, states in few bits."""
