"""Measures models that take turns on a device; see `__main__`."""
