"""What scripts import of DeepSpeed's pipelines."""

from polyreme.compat.deepspeed.refusal import absent
from polyreme.compat.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

DualPipeVModule = absent(
    "deepspeed.pipe.DualPipeVModule", "no schedule has two stages in a V on each rank", "use PipelineModule"
)

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]
