"""The interpreter of a schedule's row, where that can be seen without another rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyreme.distributed.mesh import Axis, Mesh
from polyreme.distributed.work import DONE, Work
from polyreme.errors import ModelError
from polyreme.pipeline.executor import Calls, Row, Stages, Whole
from polyreme.pipeline.schedule import Action


class Sent(Axis):
    """Keeps what is sent to the other of two ranks."""

    def __init__(self) -> None:
        super().__init__("pp", 2, 0)
        self.values: list[Any] = []

    def send_object(self, value: object, to: int) -> None:
        self.values.append(value)

    def send(self, tensor: Tensor, to: int) -> Work:
        self.values.append(tensor)
        return DONE


def test_shapes_are_told_once_and_must_follow_from_the_batchs() -> None:
    axis = Sent()
    mesh = Mesh(0, 2, torch.device("cpu"), {"pp": 2}, axes={"pp": axis})
    stages = Stages([0, 1], mesh, {0: Whole()})
    row = [Action("F", 0, 0), Action("SA", 0, 0)]

    def run(length: int, batch: str) -> None:
        calls = Calls(lambda action: None, lambda batch: torch.ones(2, length), lambda batch, output: None)
        Row(stages, row, calls, [batch], [batch]).run()

    for length, batch in ((3, "short"), (3, "short"), (4, "long"), (3, "short")):
        run(length, batch)
    forms = [value["shape"] for value in axis.values if not isinstance(value, Tensor)]
    assert forms == [[2, 3], [2, 4]] and len(axis.values) == 6
    with pytest.raises(ModelError, match=r"stage 0 hands on .* than for an earlier batch of the same shape"):
        run(5, "short")
