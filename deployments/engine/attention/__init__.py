"""The KV cache, and how a packed step writes and reads it."""
