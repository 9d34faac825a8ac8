"""DeepSpeed's monitors: where a run's figures go."""
