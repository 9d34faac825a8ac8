"""How numbers of several ranks become one."""

from torch.distributed import ReduceOp

__all__ = ["ReduceOp"]
