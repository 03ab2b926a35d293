"""KV slots, and how a packed step writes and reads them."""
