"""Checkpoints: reads, writes and verifies them, as Hugging Face directories."""
