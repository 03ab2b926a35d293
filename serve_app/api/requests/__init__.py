"""The steps of every surface before an answer begins: look up model, read prompt, open streams."""
