"""Updates: parameter groups, learning rates, CPU kernels, quantised states."""
