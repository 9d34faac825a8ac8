"""Context parallelism: the tokens of each sequence are divided over ranks (`mesh.cp`)."""
