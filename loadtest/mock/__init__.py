"""A server that answers by a script: for tests, and to calibrate the load tester by."""
