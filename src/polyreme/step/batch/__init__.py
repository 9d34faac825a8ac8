"""What a rank trains on in a step: loaders, batches and micro-batches."""
