"""DeepSpeed's names of what an engine's optimizer is an instance of."""

from polyreme.compat.deepspeed.runtime.engine import DeepSpeedOptimizer

ZeROOptimizer = DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
