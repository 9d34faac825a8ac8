"""Tensor and sequence parallelism on plain tensors, in models that are not rewritten. `parallelize` is the
way in."""
