"""Looks at models: what blocks, heads and tensors they have, under which names, and what surrounds them."""
