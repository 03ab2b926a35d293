"""Refuses names under which a web page could read a server without keys: DNS rebinding.

A browser lets a page read answers of the host that it came from. The owner of a page's name may
point it at 127.0.0.1 once the page is open; then the page reads what listens there. Its requests
keep the page's name in their `Host`, which no script can change.

A server that others can reach has keys, which such a page does not know, or serves every client.
"""

from collections.abc import Awaitable, Collection
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract.errors import ForeignHostError
from serve_app.http.errors import error_response

NOT_FOR_SALE: Final = (".localhost", ".local", ".internal")
"""Endings of names that no stranger can own. Sources: RFC 6761, RFC 6762; ICANN reserved `internal`
in 2024."""

UNKNOWN: Final = (
    "This server has no API keys, so it answers only to names that no web page can have. Ask "
    "127.0.0.1 or localhost; or add the name in the Host header to auth.allowed_hosts if it is "
    "yours, such as that of a proxy in front; or make API keys."
)


class KnownHostsMiddleware:
    """Passes on requests to IP addresses, names that no stranger can own, and allowed ones."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            allowed: Further names, in lower case.
        """
        self._app = app
        self._allowed = frozenset(allowed)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass the request on, or answer 403."""
        if scope["type"] != "http" or self._is_known(Headers(scope=scope).get("host", "")):
            return self._app(scope, receive, send)
        return error_response(ForeignHostError(UNKNOWN))(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        """Return whether no stranger's page can have sent a request with this header.

        Args:
            host: A name or an address, perhaps with a port. Browsers leave none out.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        return (
            "." not in name  # also an IPv6 address
            or name.endswith(NOT_FOR_SALE)
            or name in self._allowed
            or _is_address(name)
        )


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
