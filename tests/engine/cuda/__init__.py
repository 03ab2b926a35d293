"""Tests of what makes a step fast on a GPU."""
