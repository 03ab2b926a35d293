"""Tests of the embedded models and of their training."""
