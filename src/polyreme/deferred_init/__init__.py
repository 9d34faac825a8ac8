"""Builds models shard by shard: records their initialisation, and replays it for the tensors that a rank
holds."""
