"""DeepSpeed's `runtime.activation_checkpointing`."""
