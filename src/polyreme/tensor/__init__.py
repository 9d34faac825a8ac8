"""Tensor and sequence parallelism on plain tensors, in models that are not rewritten; begin with
`parallelize`."""
