"""The parts that all JSON bodies share: strictness, limits, refused fields."""
