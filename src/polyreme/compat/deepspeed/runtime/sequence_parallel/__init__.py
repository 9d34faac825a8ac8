"""DeepSpeed's `runtime.sequence_parallel`."""
