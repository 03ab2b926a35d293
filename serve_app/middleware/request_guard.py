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
from serve_app.http.json_route import file_too_large, too_large
from serve_app.http.route_hints import path_of

FILES_PATH: Final = "/v1/files"
"""Where files are uploaded; the surface bounds them by `jobs.max_file_bytes`."""

FORM_BYTES: Final = 2**16
"""The most that a form may be larger than its file."""

SERVE_HEADERS: Final = ("x-request-disconnect-disabled", "x-request-timeout-seconds")


class RequestGuardMiddleware:
    """Refuses requests by their headers."""

    def __init__(
        self, app: ASGIApp, limits: LimitsConfig, max_file_bytes: int | None = None
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            limits: The bounds of headers and bodies.
            max_file_bytes: The largest file that may be uploaded; None if none may.
        """
        self._app = app
        self._limits = limits
        self._max_file_bytes = max_file_bytes

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
        num_bytes = int(length[:18]) if length.isdecimal() else 0
        is_upload = scope["method"] == "POST" and path_of(scope) == FILES_PATH
        if is_upload and (most := self._max_file_bytes) is not None:
            return file_too_large(most) if num_bytes > most + FORM_BYTES else None
        return too_large(self._limits) if num_bytes > self._limits.max_body_bytes else None
