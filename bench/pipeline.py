"""Times one training step of a Llama in a pipeline, one stage on each rank, beside
torch.distributed.pipelining and DeepSpeed.

    python bench/pipeline.py --size 12m --microbatches 8 --rounds 5 --out bench/results/NAME.json

All run 1F1B over the same micro-batches, each with the cut that its users get: ours the config's default, the
others as many blocks on each rank, which is what one writes by hand; polyreme-even has theirs. Ours leaves
the last weights for later, as the config's default does; polyreme-1f1b does not. The floor is the whole model
in each process by itself, on its share of the samples: the same work without communication and without a
bubble. How turns are taken and compared: see README.md. Exit status: 0, 1 where a system failed or its losses
differ, 2 for bad usage."""

import sys

from step import main

if __name__ == "__main__":
    sys.exit(main("pipeline", __doc__))
