"""DeepSpeed's pipelines: where ranks are in them."""

from polyreme.compat.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["ProcessTopology"]
