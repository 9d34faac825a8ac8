"""DeepSpeed's linear layers with LoRA: names that scripts import."""

from polyreme.compat.deepspeed.linear.config import LoRAConfig, QuantizationConfig
from polyreme.compat.deepspeed.linear.optimized_linear import OptimizedLinear
from polyreme.compat.deepspeed.refusal import absent

_WHY = "adapters and quantised weights are those of other libraries", "wrap the model by peft"
Init = absent("deepspeed.linear.Init", *_WHY)
init_lora = absent("deepspeed.linear.init_lora", *_WHY)

__all__ = ["Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora"]
