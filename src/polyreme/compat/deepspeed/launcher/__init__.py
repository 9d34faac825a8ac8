"""DeepSpeed's launcher: its options, hostfiles and filters, over `polyreme.launch`."""
