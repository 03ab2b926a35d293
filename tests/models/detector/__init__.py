"""Tests of pydoc-detector and of what made it."""
