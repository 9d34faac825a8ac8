"""What an engine is between two steps, to a checkpoint and back."""
