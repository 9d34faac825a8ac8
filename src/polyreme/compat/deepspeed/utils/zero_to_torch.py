#!/usr/bin/env python
"""Turns a checkpoint that `engine.save_checkpoint` or DeepSpeed left into weights of a dtype:

python zero_to_torch.py . output_dir/ --dtype bfloat16 --safe_serialization
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

if __package__:
    from polyreme.compat.deepspeed.utils import zero_to_fp32
else:  # beside a checkpoint
    import zero_to_fp32  # type: ignore[no-redef]


def main(args: Sequence[str] | None = None) -> None:
    """Read the arguments (`args`; None: the command line's) and convert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", help="the folder with the file `latest`")
    parser.add_argument("output_dir", help="where the weights are written")
    parser.add_argument(
        "--dtype", choices=sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES), required=True, help="of the weights"
    )
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of a file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="the checkpoint, such as global_step1")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(args))
    zero_to_fp32.debug = given.pop("debug")
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(
        given.pop("checkpoint_dir"), given.pop("output_dir"), **given
    )


if __name__ == "__main__":
    main()
