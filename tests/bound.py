"""Ends the process that imports it with the one that started it, however that ends: the forkserver's first
import, which else outlives tests that were killed where another process has a copy of its pipe."""

from polyreme.launch.processes import die_with_parent

die_with_parent()
