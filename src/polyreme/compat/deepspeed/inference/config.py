"""The config of DeepSpeed's engine of a model that is only run, refused."""

from polyreme.compat.deepspeed.refusal import absent

DeepSpeedInferenceConfig = absent(
    "deepspeed.DeepSpeedInferenceConfig", "Polyreme trains, and serves no models", "call the model itself"
)
