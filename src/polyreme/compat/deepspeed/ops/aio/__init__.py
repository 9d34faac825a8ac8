"""The name of DeepSpeed's files of asynchronous reads; Polyreme's tiers read and write by themselves."""

from polyreme.compat.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
