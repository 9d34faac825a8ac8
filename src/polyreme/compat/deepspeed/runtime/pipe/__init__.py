"""DeepSpeed's pipelines: models as lists of layers, and where ranks are in them."""

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]

__getattr__ = lazily(__name__, dict.fromkeys(("LayerSpec", "PipelineModule", "TiedLayerSpec"), "module"))
