"""Compares the engine on a GPU with the memory's bandwidth and `model.generate`; needs no Ray."""
