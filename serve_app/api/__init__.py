"""One file for each surface that a client sees, its schemas beside it."""
