"""DeepSpeed's engine that trains and generates by turns with other layers, refused."""

from polyreme.compat.deepspeed.refusal import absent

DeepSpeedHybridEngine = absent(
    "DeepSpeedHybridEngine",
    "a model keeps its own layers, which generate, too",
    "call engine.module.generate inside of deepspeed.zero.GatheredParameters",
)
