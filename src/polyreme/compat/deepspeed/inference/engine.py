"""DeepSpeed's engine of a model that is only run, refused."""

from polyreme.compat.deepspeed.refusal import absent

InferenceEngine = absent(
    "deepspeed.InferenceEngine", "Polyreme trains, and serves no models", "call the model itself"
)
