"""Which accelerator this process has: the one that was set, that the variable DS_ACCELERATOR names, or that
torch finds."""

from __future__ import annotations

import os

import torch

from polyreme.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from polyreme.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from polyreme.compat.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from polyreme.compat.deepspeed.refusal import ArgumentError, OrderError

_KINDS: dict[str, type[DeepSpeedAccelerator]] = {"cuda": CUDA_Accelerator, "cpu": CPU_Accelerator}
SUPPORTED_ACCELERATOR_LIST = list(_KINDS)

ds_accelerator: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """This process's accelerator. Raises ArgumentError where DS_ACCELERATOR names another than these."""
    global ds_accelerator
    if ds_accelerator is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in _KINDS:
            raise ArgumentError(
                f"DS_ACCELERATOR must be one of {SUPPORTED_ACCELERATOR_LIST}: Polyreme runs on no {name!r}; "
                "unset it to take the one that torch finds"
            )
        ds_accelerator = _KINDS[name]()
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator | None) -> None:
    """Take `accel_obj` from now on; None: the one that is found. Raises OrderError for what is none."""
    global ds_accelerator
    if accel_obj is not None and not isinstance(accel_obj, DeepSpeedAccelerator):
        raise OrderError(f"{type(accel_obj).__name__} accelerator is not subclass of DeepSpeedAccelerator")
    ds_accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Whether this process's accelerator is one of those above."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
