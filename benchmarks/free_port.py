"""Finds ports for servers that a benchmark or a test starts on this machine."""

import socket
from contextlib import ExitStack


def free_ports(num_ports: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now."""
    with ExitStack() as probes:
        bound = [probes.enter_context(socket.socket()) for _ in range(num_ports)]
        for probe in bound:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in bound]


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    return free_ports(1)[0]
