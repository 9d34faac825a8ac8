#!/usr/bin/env python
"""Convert a checkpoint that `engine.save_checkpoint` or DeepSpeed wrote to weights in one dtype:

python zero_to_torch.py . output_dir/ --dtype bfloat16 --safe_serialization
"""

from __future__ import annotations

from collections.abc import Sequence

if __package__:
    from polyreme.compat.deepspeed.utils import zero_to_fp32
else:  # beside a checkpoint
    import zero_to_fp32  # type: ignore[no-redef]


def main(args: Sequence[str] | None = None) -> None:
    """Read the arguments (`args`; None: the command line's) and convert."""
    names = sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES)
    given = zero_to_fp32.arguments(__doc__, args, dtype={"choices": names, "help": "of the weights"})
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(**given)


if __name__ == "__main__":
    main()
