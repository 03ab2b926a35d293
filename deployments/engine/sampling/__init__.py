"""Turns logits into the next token."""
