"""Gates and layers of experts that are divided between ranks, refused."""

from polyreme.compat.deepspeed.refusal import absent

_WHY = (
    "Polyreme has no experts that are divided between ranks yet",
    "use the model's own layer of experts, which trains as any other layer does",
)
MOELayer = absent("deepspeed.moe.sharded_moe.MOELayer", *_WHY)
TopKGate = absent("deepspeed.moe.sharded_moe.TopKGate", *_WHY)
top1gating = absent("deepspeed.moe.sharded_moe.top1gating", *_WHY)
top2gating = absent("deepspeed.moe.sharded_moe.top2gating", *_WHY)
topkgating = absent("deepspeed.moe.sharded_moe.topkgating", *_WHY)
