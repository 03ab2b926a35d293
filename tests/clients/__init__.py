"""Real client libraries against the embedded models, in the tests' own process."""
