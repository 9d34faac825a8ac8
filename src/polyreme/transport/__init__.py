"""How numbers travel between ranks, where the backends of torch.distributed are not the best way, and how that fails."""
