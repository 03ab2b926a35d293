"""The parts of a text replica around the engine: admission, prompt encoding, delta streams."""
