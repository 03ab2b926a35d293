"""Finds tool calls in an answer's text while it arrives."""
