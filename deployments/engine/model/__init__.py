"""Loads, checks, traces and runs a model."""
