"""Whether a web page of another origin sends a request.

Browsers let any page open a WebSocket, and send a POST without a body of JSON, to any server.
"""

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from deployments.contract.errors import ForeignOriginError

ANY_ORIGIN: Final = "*"


def require_origin(headers: Headers, allowed: Collection[str]) -> None:
    """Return unless a page of an origin that is not allowed sends the request.

    Args:
        headers: The request's.
        allowed: Origins besides the server's own; `*` allows all.

    Raises:
        ForeignOriginError: One does.
    """
    origin = headers.get("origin")
    if origin is None or ANY_ORIGIN in allowed or origin in allowed:
        return
    host = _host_of(origin)
    if host is None or host != headers.get("host"):
        raise ForeignOriginError(
            "Pages of this origin may not do that. Add it to cors.allowed_origins to allow it."
        )


def _host_of(origin: str) -> str | None:
    """Return the host and port of an origin; None if it is no URL."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
