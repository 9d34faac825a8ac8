"""Checkpoints of other systems, and of Hugging Face."""
