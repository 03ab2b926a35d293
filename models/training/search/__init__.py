"""Trains pydoc-search, which finds the entry of the standard library that a question is about.

The way through: ``documentation`` reads the sentences of Python's documentation; ``entries``
holds what can be found, and holds questions out; ``questions`` makes the training's questions;
``architecture`` builds an untrained model; ``train`` trains it; ``evaluate`` asks what
``encoder`` loads and compares it with ``bm25``.
"""
