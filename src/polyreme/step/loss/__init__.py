"""The loss of a micro-batch, and the reading of its autograd graph."""
