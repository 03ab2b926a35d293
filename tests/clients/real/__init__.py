"""Real clients, each in an environment of its own."""
