"""Separates a model's reasoning from its answer."""
