"""Continuous batching on stock transformers models: no Ray, no HTTP, no pydantic."""
