"""What a script sees of a step, and does to it."""
