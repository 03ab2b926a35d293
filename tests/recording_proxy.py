"""A forward proxy that leads nowhere: it notes what it is asked for, and forbids it.

Clients ask again after a 502, for seconds; a 403 is final.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import StreamRequestHandler, ThreadingTCPServer

from tests.threaded_server import answering

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
"""By which programs find a proxy; most read them in upper case, too."""


class RecordingProxy(ThreadingTCPServer):
    """Listens on a port of its own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Refusal)
        # The first lines of all requests, such as `CONNECT 127.0.0.1:8000 HTTP/1.1`.
        self.asked: list[str] = []

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a network whose hosts are all reached through this proxy."""
        url = f"http://127.0.0.1:{self.server_address[1]}"
        return {name: url for each in VARIABLES for name in (each, each.upper())}


class Refusal(StreamRequestHandler):
    server: RecordingProxy

    def handle(self) -> None:
        """Note the request."""
        self.server.asked.append(self.rfile.readline().decode("latin-1").strip())
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


@contextmanager
def recording_proxy() -> Iterator[RecordingProxy]:
    proxy = RecordingProxy()
    with answering(proxy):
        yield proxy
