"""Names of DeepSpeed's pipelines that scripts import."""

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
__getattr__ = lazily(__name__)
