"""The door: who presents no API key of ours gets no further.

It stands before the routes and knows none of them: whatever is asked for, found or not, allowed or
not, is behind it. Open are the paths in OPEN_PATHS alone, each exactly as the router will see it.
It also refuses to be left open: a server that others can reach needs keys, or the owner's word.
"""

from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.errors import InvalidApiKeyError
from serve_app.access_log import record_of
from serve_app.api.errors import error_response
from serve_app.api_keys import ENVIRONMENT_VARIABLE, ApiKey, KeyRing

OPEN_PATHS: Final = frozenset({"/health", "/ready"})

OPEN_DOOR: Final = (
    "the server listens on {host}, where others reach it, and has no API keys. Name a file of keys "
    f"under `auth.api_keys_file`, or set {ENVIRONMENT_VARIABLE} (`raystream-key new NAME` makes a "
    "key); or write `auth: {{allow_anonymous: true}}` to serve whoever comes; or listen on "
    "127.0.0.1 alone"
)


class OpenDoorError(Exception):
    """Others can reach the server, and nothing keeps them out."""


def require_closed_door(host: str | None, has_keys: bool, allow_anonymous: bool) -> None:
    """Refuse to serve without keys where others reach the port.

    Args:
        host: Where Serve's proxies listen.
        has_keys: Whether requests need a key.
        allow_anonymous: The owner wants it so.

    Raises:
        OpenDoorError: Anybody could come in.
    """
    if not (has_keys or allow_anonymous or is_loopback(host)):
        raise OpenDoorError(OPEN_DOOR.format(host=host or "all interfaces"))


def is_loopback(host: str | None) -> bool:
    """Return whether only this machine reaches the host; a name that is not "localhost" may lie."""
    if host == "localhost":
        return True
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return False


class AuthMiddleware:
    """Lets requests pass that present a key, and says in their records whose it is."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        """Wrap an application."""
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


def api_key_of(scope: Scope) -> ApiKey | None:
    """Return the key that let the request in."""
    key: ApiKey | None = scope["state"].get("api_key")
    return key


def _is_open(scope: Scope) -> bool:
    # The root path is Serve's route prefix; the router takes it off the path.
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return scope["type"] == "http" and path.removeprefix(root) in OPEN_PATHS


def _presented(headers: Headers) -> str | None:
    """Return the key in the headers: OpenAI's clients send the first, Anthropic's the second."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")
    scheme, _, credentials = authorization.partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _admit(key: ApiKey, scope: Scope) -> None:
    scope["state"]["api_key"] = key
    record_of(scope).key_name = key.name


async def _refuse(presented: str | None, scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "No API key was sent. Send it as 'Authorization: Bearer KEY'."
        if presented is None
        else "The API key is not known here. Check it, or ask whoever runs this server for one."
    )
    # Source: RFC 6750, section 3
    challenge = 'Bearer realm="raystream"' + (
        "" if presented is None else ', error="invalid_token"'
    )
    response = error_response(InvalidApiKeyError(message))
    response.headers["WWW-Authenticate"] = challenge
    await response(scope, receive, send)
