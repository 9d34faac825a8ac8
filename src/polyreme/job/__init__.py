"""The run of `polyreme train` on each rank: its steps, its checkpoints, where it begins."""
