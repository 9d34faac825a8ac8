"""DeepSpeed's record of its own build: the version, the extensions that were compiled (none), and torch's
versions."""

from __future__ import annotations

from typing import Any

from polyreme.compat.finder import VERSIONS
from polyreme.version import VERSION

version = VERSIONS["deepspeed"]
git_hash = f"polyreme-{VERSION}"
git_branch = "polyreme"
_OPS = (
    "deepspeed_not_implemented",
    "async_io",
    "deepspeed_ccl_comm",
    "deepspeed_shm_comm",
    "cpu_adagrad",
    "cpu_adam",
    "cpu_lion",
    "fused_adam",
    "pin_memory",
)
installed_ops = dict.fromkeys(_OPS, False)
"""The extensions, each with whether it was compiled at installation: none was, as Polyreme has none to
compile."""


def __getattr__(name: str) -> Any:
    if name == "torch_info":
        return _torch_info()
    if name == "accelerator_name":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    raise AttributeError(f"there is no {name} in {__name__}")


def _torch_info() -> dict[str, Any]:
    """Return the versions of torch and of the libraries that it was built for; "0.0" stands for none."""
    import torch

    cuda = torch.version.cuda is not None and torch.cuda.is_available()
    return {
        "version": ".".join(torch.__version__.split(".")[:2]),
        "bf16_support": cuda and torch.cuda.is_bf16_supported(),
        "cuda_version": torch.version.cuda or "0.0",
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if cuda else "0.0",
        "hip_version": torch.version.hip or "0.0",
    }
