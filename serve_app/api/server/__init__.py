"""The server's state: its health, its version, its models."""
