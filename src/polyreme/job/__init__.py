"""The run of `polyreme train` on each rank: its steps, its checkpoints, and where it begins."""
