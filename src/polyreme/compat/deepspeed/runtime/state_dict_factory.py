"""DeepSpeed's loaders of Megatron's checkpoints, refused."""

from polyreme.compat.deepspeed.refusal import absent

_WHY = (
    "files of Megatron-LM, which are pickled, are not read",
    "convert the checkpoint to Hugging Face's form, and load the model from it",
)
SDLoaderFactory = absent("SDLoaderFactory", *_WHY)
SDLoaderBase = absent("SDLoaderBase", *_WHY)
MegatronSDLoader = absent("MegatronSDLoader", *_WHY)
