"""DeepSpeed's `runtime` package: names over Polyreme's own."""
