"""Inspects models: finds their blocks, heads, adapters and buffers, and removes wrappers around them."""
