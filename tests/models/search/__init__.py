"""Tests of pydoc-search and of its training."""
