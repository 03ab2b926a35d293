"""Holds requests of limited API keys to their limits, whichever ingress they come through.

Asks the key ledger once before a POST request goes on, and tells it at the end what the request
took: tokens are charged exactly, when they are known. So a key may overdraw by what was running at
that moment, and then waits the longer; `max_concurrent_streams` bounds that. Keys without limits,
and requests that ask for no work, never wait for the ledger.

When the ledger can't be asked, requests of limited keys are refused with 503: a limit that ends
where somebody breaks the counter is none, and Serve starts another counter within seconds.
"""

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterator
from contextvars import Context
from typing import Any, Final, Protocol, TypeVar, cast

from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import RateLimitError, RateLimitsUnavailableError, RaystreamError
from serve_app.access_log import RequestRecord, record_of
from serve_app.api.errors import error_response
from serve_app.api_keys import ApiKey
from serve_app.auth import api_key_of
from serve_app.backends import our_errors
from serve_app.key_ledger import Allowance, Verdict

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

LEDGER_TIMEOUT_S: Final = 5.0
"""Serve needs two or three seconds to start another ledger; a request may wait so long."""

SETTLE_TIMEOUT_S: Final = 1.0
"""A ledger that is gone has forgotten the request anyway, and the answer's last byte waits."""

_REFUSALS: Final = {
    "requests": "The API key has used up its requests per minute.",
    "tokens": "The API key has used up its tokens per minute.",
    "streams": "The API key has as many requests running as it may at once.",
}


class Ledger(Protocol):
    """The key ledger, wherever it runs."""

    async def admit(self, name: str, ticket: str) -> Verdict:
        """Decide on a request; see `KeyLedger.admit`.

        Raises:
            RaystreamError: The ledger can't be reached.
        """
        ...

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        """Note the end of a request; see `KeyLedger.settle`.

        Raises:
            RaystreamError: The ledger can't be reached.
        """
        ...


class HandleLedger:
    """The key ledger behind a Ray Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        """Keep the handle."""
        self._handle = handle

    async def admit(self, name: str, ticket: str) -> Verdict:
        """Ask the ledger; see `Ledger.admit`."""
        with our_errors():
            return cast("Verdict", await self._handle.admit.remote(name, ticket))

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        """Tell the ledger; see `Ledger.settle`."""
        with our_errors():
            await self._handle.settle.remote(name, ticket, num_tokens)


class RateLimitMiddleware:
    """Asks before a request and settles behind it."""

    def __init__(self, app: ASGIApp, ledger: Ledger, timeout_s: float = LEDGER_TIMEOUT_S) -> None:
        """Wrap an application.

        Args:
            app: What is wrapped. Requests must have been admitted by `AuthMiddleware`.
            ledger: Keeps the accounts.
            timeout_s: How long to wait for it.
        """
        self._app = app
        self._ledger = ledger
        self._timeout_s = timeout_s
        # The event loop itself holds its tasks but weakly.
        self._settling: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 429 or 503."""
        key = api_key_of(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if key is None or not key.is_limited:
            await self._app(scope, receive, send)
            return
        running = _Running(self._ledger, key, record_of(scope))
        try:
            verdict = await self._ask(running)
            app = self._app
            if verdict.refused_by is not None:
                running.is_settled = True
                app = error_response(_refusal(verdict))
            await app(scope, receive, self._limited(send, verdict, running))
        except RateLimitsUnavailableError as error:
            await error_response(error)(scope, receive, send)
        finally:
            if not running.is_settled:
                self._settle(running)

    async def _ask(self, running: "_Running") -> Verdict:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await running.verdict()
        except (RaystreamError, TimeoutError) as error:
            logger.warning("the key ledger can't be asked: %s", error or "no answer in time")
            raise RateLimitsUnavailableError(
                "The limits of the API key can't be looked up. Try again in a moment."
            ) from None

    def _settle(self, running: "_Running") -> asyncio.Task[None]:
        running.is_settled = True
        task = _start(running.settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task

    def _limited(self, send: Send, verdict: Verdict, running: "_Running") -> Send:
        """Put the headers on, and settle before the last byte.

        So a client that sends one request after the other never finds its own last one still
        running. One that leaves at this very moment must not take the message to the ledger with
        it: its stream would count for an hour.
        """

        async def limited(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict(_headers(verdict)))
            elif not (running.is_settled or message.get("more_body", False)):
                await asyncio.shield(self._settle(running))
            await send(message)

        return limited


class _Running:
    """A request that the ledger has counted, or may have and was not heard.

    Attributes:
        is_settled: Whether the ledger was told, or is being told, that it has ended; or need not
            be.
    """

    def __init__(self, ledger: Ledger, key: ApiKey, record: RequestRecord) -> None:
        """Show the request to the ledger."""
        self.is_settled = False
        self._ledger = ledger
        self._key = key
        self._record = record
        # A name of its own: a client may use a request id twice.
        self._ticket = secrets.token_hex(16)
        self._admission = _start(ledger.admit(key.name, self._ticket))

    async def verdict(self) -> Verdict:
        """Return what the ledger says; who stops waiting for it does not take the question back."""
        return await asyncio.shield(self._admission)

    async def settle(self) -> None:
        """Tell the ledger that the request has ended, once it knows that it began."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await asyncio.gather(self._admission, return_exceptions=True)
                await self._ledger.settle(self._key.name, self._ticket, self._record.num_tokens)
        except (RaystreamError, TimeoutError) as error:
            logger.warning("the key ledger missed an end: %s", error or "no answer in time")


def _start(message: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Send the ledger a message that does not end with the request it is about.

    It gets a context of its own, by which Serve, too, cancels what a request has asked for.
    """
    return asyncio.get_running_loop().create_task(message, context=Context())


def _refusal(verdict: Verdict) -> RateLimitError:
    assert verdict.refused_by is not None, "only refusals are told"
    message = f"{_REFUSALS[verdict.refused_by]} Try again in {duration(verdict.retry_after_s)}."
    return RateLimitError(message, None, verdict.retry_after_s)


def _headers(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield what OpenAI tells of a key's limits.

    Source: https://platform.openai.com/docs/guides/rate-limits (rate limits in headers)
    """
    allowances: dict[str, Allowance | None] = {
        "requests": verdict.requests,
        "tokens": verdict.tokens,
    }
    for name, allowance in allowances.items():
        if allowance is not None:
            yield f"x-ratelimit-limit-{name}", str(allowance.limit)
            yield f"x-ratelimit-remaining-{name}", str(allowance.remaining)
            yield f"x-ratelimit-reset-{name}", duration(allowance.reset_s)


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: "1.5s", "6m0s", "20ms"."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
