"""DeepSpeed's names over Polyreme: what `import deepspeed` finds once `install` was called, or under
`polyreme launch --deepspeed`."""

from __future__ import annotations

from polyreme.compat import finder
from polyreme.compat.deepspeed.lazy import lazily

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
        "DeepSpeedTransformerConfig": "ops",
        "DeepSpeedTransformerLayer": "ops",
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
    """Have `import deepspeed` find this package, and `importlib.metadata` DeepSpeed 0.19.8, in this process
    and in the Python processes that it starts: for the top of a script or notebook. Again is harmless.

    Raises `polyreme.compat.finder.DoorError` where another DeepSpeed is imported already, or transformers or
    accelerate have looked for it."""
    finder.install("deepspeed")
