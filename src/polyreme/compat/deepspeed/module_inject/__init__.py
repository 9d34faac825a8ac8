"""DeepSpeed's replacement of a model's layers, refused: models keep their own."""

from polyreme.compat.deepspeed.lazy import lazily
from polyreme.compat.deepspeed.refusal import absent

_WHY = (
    "a model keeps its own layers",
    "leave it out; tensor_parallel.autotp_size in the config divides the model's layers",
)
replace_transformer_layer = absent("deepspeed.module_inject.replace_transformer_layer", *_WHY)
revert_transformer_layer = absent("deepspeed.module_inject.revert_transformer_layer", *_WHY)
generic_injection = absent("deepspeed.module_inject.generic_injection", *_WHY)
set_autotp_mode = absent("deepspeed.module_inject.set_autotp_mode", *_WHY)
LinearAllreduce = absent("deepspeed.module_inject.LinearAllreduce", *_WHY)
LinearLayer = absent("deepspeed.module_inject.LinearLayer", *_WHY)
DSPolicy = absent("deepspeed.module_inject.DSPolicy", *_WHY)

__getattr__ = lazily(__name__)
