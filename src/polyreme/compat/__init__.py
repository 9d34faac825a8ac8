"""Front doors of other systems: their names and calls, translated to Polyreme's own. A door holds no
mechanism: what it needs and Polyreme lacks is added to the engine."""
