"""DeepSpeed's engines of models that are only run: names that scripts import."""
