"""DeepSpeed's names over Polyreme: what `import deepspeed` finds once `install` was called, or under
`polyreme launch --deepspeed`."""
