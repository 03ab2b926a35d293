"""A server with known timing and faults, to test the load tester and to try it out."""
