"""Constrains a sequence's text by a grammar."""
