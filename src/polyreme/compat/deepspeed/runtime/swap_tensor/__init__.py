"""A size around DeepSpeed's NVMe offload."""

MIN_SWAPPABLE_BYTES = 2**20
"""Bytes of the smallest tensor that DeepSpeed moves to a file; here the smallest goes, too."""
