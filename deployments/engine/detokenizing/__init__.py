"""Turns token ids into text and applies stop strings."""
