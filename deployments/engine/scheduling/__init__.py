"""Decides what the next step runs; touches no tensors."""
