"""DeepSpeed's small helpers."""
