"""Times forward and backward of two Llama blocks, divided over the ranks by tensor parallelism, beside
torch's DTensor.

    python bench/tensor.py --size h256,h512,h1024 --rounds 10 --out bench/results/NAME.json

The floor is the same blocks undivided in each process by itself, on its share of the samples: the same work
without communication. "polyreme-silent" is the divided computation with its sums over the ranks left out: the
same operations without communication. How turns are taken and compared: see README.md. Exit status: 0, 1
where a system failed or its losses differ, 2 for bad usage."""

import sys

from step import main

if __name__ == "__main__":
    sys.exit(main("tensor", __doc__, size="h256,h512,h1024", batch=1, sequence=512, steps=8, settle=2))
