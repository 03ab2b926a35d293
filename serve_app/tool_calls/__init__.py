"""The calls of tools in an answer: found in its text, as it arrives."""
