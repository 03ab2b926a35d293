"""Tests of the embedded models and of what made them."""
