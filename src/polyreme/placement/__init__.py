"""The placement of a model: opened, divided over stages, tensor parallelism and ranks, and moved into
buckets."""
