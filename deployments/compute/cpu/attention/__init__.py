"""Attention of query rows over the KV cache, as machine code."""
