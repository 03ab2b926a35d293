"""Answers of a model as events and as blocks, which the surfaces frame."""
