"""The loss of a micro-batch, and what its graph tells of it."""
