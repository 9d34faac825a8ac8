"""Ranks: the mesh and its axes, the collectives on them, and waiting for each other."""
