"""The data of a step on one rank: loaders, batches and micro-batches."""
