"""The cost of a run, known before it runs."""
