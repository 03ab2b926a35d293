"""The arithmetic of device memory, and the few calls that enforce it."""
