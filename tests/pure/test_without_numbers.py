"""What is read of tensors without numbers is zero."""

from __future__ import annotations

import pytest
import torch

from polyreme.distributed.without_numbers import WithoutNumbers


def test_numbers_that_are_read_are_zero() -> None:
    empty = torch.ones(2, 3, device="meta", dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, NotImplementedError)):
        empty.sum().item()
    with WithoutNumbers():
        assert empty.sum().item() == 0.0 and not (empty > 0).any()
        assert empty.tolist() == [[0.0] * 3] * 2
        for copy in (empty.cpu(), empty.to("cpu", torch.float64), empty.to("cpu", non_blocking=True)):
            assert copy.device.type == "cpu" and not copy.any() and copy.shape == empty.shape
        assert empty.to("cpu", torch.float64).dtype == torch.float64
        for non_blocking in (False, True):
            assert not torch.ones(2, 3).copy_(empty, non_blocking).any()


def test_other_tensors_are_as_they_were() -> None:
    with WithoutNumbers():
        assert torch.ones(3).sum().item() == 3.0
        assert torch.zeros(2).copy_(torch.ones(2)).tolist() == [1.0, 1.0]
        assert torch.ones(3).to("meta").double().is_meta
        assert torch.empty(3, device="meta").copy_(torch.ones(3)).is_meta
