"""Refuses requests before any route sees them.

It refuses headers that are too large, a body that says that it is too large, and headers that
control Ray Serve. Bodies are bounded where they are read, in `serve_app.http.json_route`
and, if they are files, in `serve_app.api.files`.

Serve reads two such headers from any client before our code runs: one switches off its detection of
disconnects, the other sets its time limit. This code can't remove them, so a request that carries
one is refused.
"""

from collections.abc import Awaitable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract.errors import HeadersTooLargeError, InvalidRequestError
from serve_app.config import LimitsConfig
from serve_app.http.errors import error_response
from serve_app.http.json_route import too_large
from serve_app.http.route_hints import path_of

FILES_PATH: Final = "/v1/files"
"""Where files are uploaded; the surface bounds them by `jobs.max_file_bytes`."""

SERVE_HEADERS: Final = ("x-request-disconnect-disabled", "x-request-timeout-seconds")


class RequestGuardMiddleware:
    """Refuses requests by their headers."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig, max_upload_bytes: int = 0) -> None:
        """Wrap an application.

        Args:
            app: The application.
            limits: The bounds of headers and bodies.
            max_upload_bytes: The largest body of an uploaded file, if that is more.
        """
        self._app = app
        self._limits = limits
        self._max_upload_bytes = max(max_upload_bytes, limits.max_body_bytes)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Refuse the request at once, or pass it on."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return error_response(refusal)(scope, receive, send)
        return self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequestError | None:
        limit = self._limits.max_header_bytes
        if sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            return HeadersTooLargeError(
                f"The headers are larger than {limit} bytes, the most that is read "
                "(limits.max_header_bytes)."
            )
        headers = Headers(scope=scope)
        for name in SERVE_HEADERS:
            if name in headers:
                return InvalidRequestError(f"The header {name!r} is not accepted.", name)
        length = headers.get("content-length", "")
        # The HTTP server refuses a length that is not a number; what comes is counted in any case.
        is_upload = scope["method"] == "POST" and path_of(scope) == FILES_PATH
        most = self._max_upload_bytes if is_upload else self._limits.max_body_bytes
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            return too_large(self._limits)
        return None
