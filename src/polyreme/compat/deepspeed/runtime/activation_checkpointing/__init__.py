"""The package `deepspeed.runtime.activation_checkpointing`."""
