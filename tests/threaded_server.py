"""Servers of the standard library that answer a test from a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer

POLL_S = 0.01


@contextmanager
def answering(server: BaseServer) -> Iterator[None]:
    """Let a server answer during the block, and close it afterwards."""
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
