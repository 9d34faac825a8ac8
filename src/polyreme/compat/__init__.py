"""Packages with the names and functions of other systems, each of which calls Polyreme's own ("doors"). A
door does no work of its own: what it needs and Polyreme lacks is added to Polyreme."""
