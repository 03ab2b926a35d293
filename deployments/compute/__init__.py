"""Arithmetic that the engine and the classifier share. It knows no sequences or requests."""
