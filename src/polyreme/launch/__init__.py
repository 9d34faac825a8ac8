"""Starting ranks. An edge: no mechanism knows how its process was started."""
