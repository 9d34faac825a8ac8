"""Formats of checkpoints that are read: of Hugging Face, DeepSpeed and torch.distributed.checkpoint."""
