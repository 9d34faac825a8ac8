"""Where a model lies: opened, divided over stages, tensor parallelism and ranks, and moved into buckets."""
