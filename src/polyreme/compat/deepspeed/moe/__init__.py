"""DeepSpeed's mixture of experts: names that scripts import."""
