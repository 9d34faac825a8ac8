"""Adagrad by DeepSpeed's name."""

from polyreme.compat.deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
