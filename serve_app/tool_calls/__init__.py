"""The calls of tools: what a request offers, what forces a call, and what an answer holds."""
