"""What is taken apart is put together again, and its form tells all but the numbers."""

from __future__ import annotations

import json

import pytest
import torch

from polyreme.errors import ModelError
from polyreme.pipeline.activation_spec import buffers, flatten, unflatten


def test_a_form_tells_all_but_the_numbers() -> None:
    value = (
        torch.ones(2, 3, requires_grad=True) * 2,
        [torch.arange(3), None],
        {"a": torch.zeros((), dtype=torch.bool), "b": 1.5},
    )
    form, tensors = flatten(value)
    form = json.loads(json.dumps(form))
    arrived = buffers(form, torch.device("cpu"))
    assert [(t.shape, t.dtype) for t in arrived] == [(t.shape, t.dtype) for t in tensors]
    for here, there in zip(arrived, tensors, strict=True):
        here.copy_(there.detach())
    back = unflatten(form, arrived)
    assert torch.equal(back[0], value[0]) and back[0].is_leaf and back[0].requires_grad
    assert torch.equal(back[1][0], value[1][0]) and not back[1][0].requires_grad and back[1][1] is None
    assert back[2]["b"] == 1.5 and back[2]["a"].dtype == torch.bool
    assert flatten(back)[0] == form
    with pytest.raises(ModelError, match="hands a set from block to block"):
        flatten((tensors[0], {1}))
