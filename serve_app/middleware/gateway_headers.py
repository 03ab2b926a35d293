"""Reads whose a request is, and how soon it should run, from the headers of a trusted gateway.

The application has this middleware only with `auth.trusted_gateway`: any client can send such
headers. Requests without them stay as their keys say.

Source: https://llm-d.ai/docs/api-reference/epp-http-headers; the names of the Gateway API inference
extension, `x-gateway-*`, are the older ones, and give way to the newer as they do there.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract.errors import InvalidRequestError
from serve_app.http.errors import error_response
from serve_app.http.request_record import record_of

FAIRNESS_IDS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
"""Headers that name the tenant; the first that is there counts."""

OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers that name the objective, likewise."""

MAX_TENANT_LENGTH: Final = 256
"""Characters of a fairness id: replicas keep it as long as its tenant has requests."""


class GatewayHeadersMiddleware:
    """Notes a request's tenant and priority in its record."""

    def __init__(self, app: ASGIApp, objectives: Mapping[str, int]) -> None:
        """Wrap an application.

        Args:
            app: The application. `AuthMiddleware` must have admitted its requests.
            objectives: The priority of each objective, by its name.
        """
        self._app = app
        self._objectives = objectives

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, record = Headers(scope=scope), record_of(scope)
        tenant, objective = _first(headers, FAIRNESS_IDS), _first(headers, OBJECTIVES)
        if len(tenant) > MAX_TENANT_LENGTH:
            error = InvalidRequestError(
                f"The gateway's fairness id has more than {MAX_TENANT_LENGTH} characters."
            )
            await error_response(error)(scope, receive, send)
            return
        if tenant:
            record.standing = record.standing.of_tenant(tenant)
        if objective in self._objectives:
            priority = self._objectives[objective]
            record.standing = record.standing.with_objective(objective, priority)
        await self._app(scope, receive, send)


def _first(headers: Headers, names: Sequence[str]) -> str:
    """Return the first of these headers that is there, or an empty text."""
    return next((headers[name].strip() for name in names if name in headers), "")
