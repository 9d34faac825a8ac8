"""Attention over sequences that are divided between ranks, refused."""

from polyreme.compat.deepspeed.refusal import absent

_WHY = (
    "Polyreme does not divide sequences between ranks yet",
    "use the model's own attention; ZeRO 3 and recomputation make room for long sequences",
)
DistributedAttention = absent("deepspeed.sequence.layer.DistributedAttention", *_WHY)
single_all_to_all = absent("deepspeed.sequence.layer.single_all_to_all", *_WHY)
