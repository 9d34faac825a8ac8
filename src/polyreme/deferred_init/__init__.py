"""Models that are built shard by shard: their initialisation is recorded, and replayed for the parts that a
rank holds."""
