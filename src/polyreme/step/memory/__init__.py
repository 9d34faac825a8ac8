"""The memory of a step: activations kept or recomputed, and reports and forecasts."""
