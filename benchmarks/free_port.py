"""Finds a port for a server that a benchmark or a test starts on this machine."""

from serve_app.commands.server_environment import free_ports


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens; see `free_ports`."""
    return free_ports(1)[0]
