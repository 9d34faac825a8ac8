"""DeepSpeed's division of layers over tensor-parallel ranks, refused by its names: the config asks for it."""

from polyreme.compat.deepspeed.refusal import absent

_WHY = (
    "`deepspeed.initialize` divides a model by its plan of names",
    "write tensor_parallel.autotp_size in the config",
)
AutoTP = absent("deepspeed.module_inject.auto_tp.AutoTP", *_WHY)
Loading = absent("deepspeed.module_inject.auto_tp.Loading", *_WHY)
ReplaceWithTensorSlicing = absent("deepspeed.module_inject.auto_tp.ReplaceWithTensorSlicing", *_WHY)
