"""Batches: OpenAI's `/v1/batches`."""
