"""What DeepSpeed's engine does for torch.autocast, refused by its names: ours does it, from the config."""

from polyreme.compat.deepspeed.refusal import absent

_WHY = (
    "the engine opens torch.autocast around its forwards by itself",
    'write {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}} in the config',
)
init_autocast_params = absent("deepspeed.runtime.torch_autocast.init_autocast_params", *_WHY)
autocast_if_enabled = absent("deepspeed.runtime.torch_autocast.autocast_if_enabled", *_WHY)
get_comm_dtype = absent("deepspeed.runtime.torch_autocast.get_comm_dtype", *_WHY)
has_comm_dtype = absent("deepspeed.runtime.torch_autocast.has_comm_dtype", *_WHY)
