"""Starting ranks, and finding out inside one which it is. An edge: no mechanism knows how its process was started."""
