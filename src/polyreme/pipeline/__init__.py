"""Pipelines: cuts a model into stages, and executes the table that says which rank runs which stage when."""
