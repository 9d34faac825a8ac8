"""One optimizer step, from the user's model to the update."""
