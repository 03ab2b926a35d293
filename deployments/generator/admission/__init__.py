"""Which sequences a replica admits, which of them run, and how they come into the engine."""
