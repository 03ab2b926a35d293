"""Measures fair shares and priorities; see `__main__`."""
