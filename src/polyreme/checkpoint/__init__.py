"""Checkpoints are Hugging Face directories."""
