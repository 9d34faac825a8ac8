"""Sharding: parameters, gradients and optimizer states in buckets, of which each rank holds a shard."""
