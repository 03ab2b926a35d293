"""Part of `raystream check`: HAProxy must be able to read larger headers than our limit.

HAProxy refuses headers that do not fit into its buffer with an answer of its own, in HTML. So the
buffer must be larger than `limits.max_header_bytes`: then larger headers get our 431 in JSON.

Source: https://docs.haproxy.org/2.8/configuration.html#tune.bufsize and tune.maxrewrite
"""

from collections.abc import Iterator, Mapping
from typing import Final

from serve_app.config import AppConfig

BUFSIZE: Final = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"

ROOM_BYTES: Final = 8 * 2**10
"""Beyond names and values: 1 KiB that HAProxy keeps free for rewriting, the request line with its
path, and what separates the headers, at most 101 of them."""


def header_problems(config: AppConfig, path: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the mistake if HAProxy's buffer, where it is set, is too small for our limit."""
    bufsize = environment.get(BUFSIZE, "")
    max_header_bytes = config.limits.max_header_bytes
    if bufsize.isdecimal() and int(bufsize) < max_header_bytes + ROOM_BYTES:
        yield (
            f"{path}.args.limits.max_header_bytes: {max_header_bytes} does not fit into HAProxy's "
            f"buffer of {bufsize} bytes ({BUFSIZE}, see serve.env), which needs {ROOM_BYTES} more; "
            "HAProxy would refuse such headers with an answer of its own, in HTML"
        )
