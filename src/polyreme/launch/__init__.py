"""Starting ranks. No package below depends on how its process was started."""
