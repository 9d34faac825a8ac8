"""DeepSpeed's `compile`: the section of a config."""
