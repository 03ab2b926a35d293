"""Tests of pydoc-detector and of its training."""
