"""Pipelines: a model cut into stages, and the table that says which rank runs which of them when."""
