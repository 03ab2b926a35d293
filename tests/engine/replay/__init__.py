"""Tests of decode steps that are replayed as a whole."""
