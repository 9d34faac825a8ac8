"""What a step keeps in memory, recomputes, and tells of it."""
