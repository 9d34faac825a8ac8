"""Run one collective, to check that ranks on this host reach each other; `polyreme doctor` runs it on two.

Communication: one all-reduce of one number. Invariant: it ends with status 0 only if the sum is right."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from polyreme.errors import TransportError


def main() -> None:
    """Sum 1 over all ranks. Raises TransportError for a wrong sum."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    total = torch.ones(())
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise TransportError(
            f"ones over {dist.get_world_size()} ranks sum to {total.item()}; reinstall torch"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
