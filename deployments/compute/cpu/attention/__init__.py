"""Attention of query rows over KV slots, as machine code."""
