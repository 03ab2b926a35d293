"""Authentication: a request without a known API key gets a 401.

The check comes before the routes and does not depend on them: existing, unknown and forbidden paths
all need a key. Only the paths in OPEN_PATHS don't, and to be read, the page and its files
(PAGE_PATHS); they are compared exactly as the router will see them.
This module also refuses to start a server that others can reach without keys, unless the owner has
allowed that.
"""

from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract.errors import InvalidApiKeyError
from serve_app.config import ApiKey
from serve_app.http.errors import error_response
from serve_app.http.request_record import record_of
from serve_app.http.standing import Standing
from serve_app.keys.access import note_api_key
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE, KeyRing
from serve_app.playground.page import PAGE_PATHS

OPEN_PATHS: Final = frozenset({"/health", "/live", "/ready"})
READING: Final = frozenset({"GET", "HEAD"})

UNPROTECTED: Final = (
    "the server listens on {host}, where others can reach it, and has no API keys. Name a file of "
    f"keys under `auth.api_keys_file`, or set {ENVIRONMENT_VARIABLE} (`raystream new-key NAME` "
    "makes a key); or write `auth: {{allow_anonymous: true}}` to serve every client; or listen "
    "only on 127.0.0.1"
)


class UnprotectedServerError(Exception):
    """Others can reach the server, and it has no keys."""


def require_protection(host: str | None, has_keys: bool, allow_anonymous: bool) -> None:
    """Refuse to serve without keys if others can reach the port.

    Args:
        host: The address that Serve's proxies listen on.
        has_keys: Whether requests need a key.
        allow_anonymous: Whether the owner allows requests without keys.

    Raises:
        UnprotectedServerError: Any client on the network could use the server.
    """
    if not (has_keys or allow_anonymous or is_loopback(host)):
        raise UnprotectedServerError(UNPROTECTED.format(host=host or "all interfaces"))


def is_loopback(host: str | None) -> bool:
    """Return whether only this machine can reach the host; of names, only "localhost" counts."""
    if host == "localhost":
        return True
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return False


class AuthMiddleware:
    """Passes on requests that present a known key, and notes its name in their records."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "lifespan" or _is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        else:
            presented = _presented(Headers(scope=scope))
            key = None if presented is None else self._keys.find(presented)
            if key is None:
                await _refuse(presented, scope, receive, send)
                return
            _admit(key, scope)
            await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    # The root path is Serve's route prefix; the router strips it from the path.
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN_PATHS or (path in PAGE_PATHS and scope["method"] in READING)


def _presented(headers: Headers) -> str | None:
    """Return the key in `Authorization`, as OpenAI's clients send it, or in `x-api-key`."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")
    scheme, _, credentials = authorization.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _admit(key: ApiKey, scope: Scope) -> None:
    note_api_key(scope, key)
    record = record_of(scope)
    record.key_name, record.standing = key.name, Standing.of_key(key)


async def _refuse(presented: str | None, scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "No API key was sent. Send it as 'Authorization: Bearer KEY'."
        if presented is None
        else "The API key is not known here. Check it, or ask the operator of this server for one."
    )
    # Source: RFC 6750, section 3
    challenge = 'Bearer realm="raystream"' + (
        "" if presented is None else ', error="invalid_token"'
    )
    response = error_response(InvalidApiKeyError(message))
    response.headers["WWW-Authenticate"] = challenge
    await response(scope, receive, send)
