"""Divides a lone request's latency among its hops, by the spans that a traced server sends.

The spans of the ingress, of its call to the replica and of the replica's work begin and end where
the request passes from one to the next. All clocks are this machine's, so their times compare.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from secrets import token_hex
from threading import Condition, Thread
from typing import Final

import aiohttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from deployments.contract.gen_ai_spans import TIME_IN_QUEUE

DEADLINE_S: Final = 20.0

HOPS: Final = (
    "client, HAProxy and HTTP, to the application",
    "JSON, validation, admission and routing",
    "message to the replica",
    "tokenizing, and the hand-over to a lane",
    "packing, forward pass, and the hand-over back",
    "message to the ingress",
    "JSON out, and the access log's line",
    "HTTP, HAProxy and client, from the application",
)
"""From each moment of a request to the next."""


@dataclass
class Collector:
    """Receives spans over OTLP/HTTP.

    Attributes:
        url: Where it listens.
        by_trace: The spans that came, by their trace's id.
    """

    url: str = ""
    by_trace: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))
    _changed: Condition = field(default_factory=Condition)

    def take(self, body: bytes) -> None:
        """Keep the spans of a request."""
        with self._changed:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for of_scope in of_resource.scope_spans:
                    for span in of_scope.spans:
                        self.by_trace[span.trace_id.hex()].append(span)
            self._changed.notify_all()

    def wait_for(self, trace_ids: Iterable[str]) -> None:
        """Wait until the three spans of each trace have come.

        Raises:
            TimeoutError: They have not, after `DEADLINE_S`.
        """
        missing = set(trace_ids)

        def came() -> bool:
            missing.difference_update({each for each in missing if len(self.by_trace[each]) == 3})
            return not missing

        with self._changed:
            if not self._changed.wait_for(came, DEADLINE_S):
                raise TimeoutError(f"{len(missing)} traces are not whole")


@contextmanager
def collecting() -> Iterator[Collector]:
    """Receive spans until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def ask_one_by_one(
    url: str, model: str, texts: Sequence[str], window_s: float
) -> dict[str, tuple[int, int]]:
    """Send one text after the other for a while.

    Returns:
        When each request was sent and answered, in Unix nanoseconds, by its trace's id.

    Raises:
        aiohttp.ClientResponseError: A request was refused.
    """
    times: dict[str, tuple[int, int]] = {}
    until_s = time.monotonic() + window_s
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        while time.monotonic() < until_s:
            trace_id = token_hex(16)
            body = {"model": model, "input": texts[len(times) % len(texts)]}
            headers = {"traceparent": f"00-{trace_id}-{token_hex(8)}-01"}
            sent_ns = time.time_ns()
            async with client.post(url, json=body, headers=headers) as response:
                await response.read()
            times[trace_id] = sent_ns, time.time_ns()
    return times


def moments(client: tuple[int, int], spans: Sequence[Span]) -> list[int]:
    """Return the moments between which the hops lie, in Unix nanoseconds.

    Args:
        client: When the client has sent the request, and had its answer.
        spans: The request's three, in any order.
    """
    request, call, work = sorted(spans, key=lambda span: span.start_time_unix_nano)
    (waited_s,) = (each.value.double_value for each in work.attributes if each.key == TIME_IN_QUEUE)
    return [
        client[0],
        request.start_time_unix_nano,
        call.start_time_unix_nano,
        work.start_time_unix_nano,
        work.start_time_unix_nano + round(1e9 * waited_s),
        work.end_time_unix_nano,
        call.end_time_unix_nano,
        request.end_time_unix_nano,
        client[1],
    ]


def medians_ms(
    clients: Mapping[str, tuple[int, int]], by_trace: Mapping[str, Sequence[Span]]
) -> dict[str, float]:
    """Return the median of each hop over all requests, in ms."""
    hops = [
        [(end - begin) / 1e6 for begin, end in pairwise(moments(times, by_trace[trace_id]))]
        for trace_id, times in clients.items()
    ]
    return dict(zip(HOPS, map(statistics.median, zip(*hops, strict=True)), strict=True))
