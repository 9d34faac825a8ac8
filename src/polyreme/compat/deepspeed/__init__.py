"""The package that `import deepspeed` finds after a call of `install`, or under `polyreme launch
--deepspeed`. Its names are DeepSpeed's, and Polyreme does the work."""

from __future__ import annotations

import sys

from polyreme.compat import finder
from polyreme.compat.deepspeed import names
from polyreme.compat.deepspeed.lazy import lazily

sys.meta_path[:] = [
    finder.Names(__name__, names),
    *(other for other in sys.meta_path if not isinstance(other, finder.Names)),
]

__version__ = version = finder.VERSIONS["deepspeed"]
__version_major__, __version_minor__, __version_patch__ = map(int, version.split("."))

__getattr__ = lazily(
    __name__,
    {
        "__git_branch__": "git_version_info:git_branch",
        "__git_hash__": "git_version_info:git_hash",
        "DeepSpeedConfig": "runtime.config",
        "DeepSpeedConfigError": "runtime.config",
        "DeepSpeedDataLoader": "runtime.dataloader",
        "DeepSpeedEngine": "runtime.engine",
        "DeepSpeedHybridEngine": "runtime.hybrid_engine",
        "DeepSpeedInferenceConfig": "inference.config",
        "DeepSpeedOptimizer": "runtime.base_optimizer",
        "DeepSpeedTransformerConfig": "ops.transformer",
        "DeepSpeedTransformerLayer": "ops.transformer",
        "DualPipeVModule": "pipe",
        "InferenceEngine": "inference.engine",
        "MUON_OPTIMIZER": "runtime.config",
        "OnDevice": "utils.init_on_device",
        "PipelineEngine": "runtime.pipe.engine",
        "PipelineModule": "pipe",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": "constants",
        "add_config_arguments": "front",
        "checkpointing": "runtime.activation_checkpointing.checkpointing:",
        "dist": "comm:",
        "get_accelerator": "accelerator",
        "git_branch": "git_version_info",
        "git_hash": "git_version_info",
        "init_distributed": "comm",
        "init_inference": "front",
        "initialize": "front",
        "log_dist": "utils.logging",
        "logger": "utils.logging",
        "replace_transformer_layer": "module_inject",
        "set_autotp_mode": "module_inject",
        "tp_model_init": "front",
        "zero": "runtime.zero:",
    },
)


def install() -> None:
    """Make `import deepspeed` find this package, and `importlib.metadata` a DeepSpeed 0.19.8, in this process
    and in the Python processes that it starts. Call it at the top of a script or notebook; a second call does
    no harm.

    Raises `polyreme.compat.finder.DoorError` if another DeepSpeed is imported already, or transformers or
    accelerate have looked for one."""
    finder.install("deepspeed")
