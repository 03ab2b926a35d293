"""Enforces the limits of API keys, whichever ingress a request comes through.

The middleware asks the key ledger once before it passes a POST request on, and reports at the end
how many tokens the request took. Tokens are charged exactly, once they are known. So a key may
overdraw by the tokens of its running requests, and then waits longer; `max_concurrent_streams`
bounds that. Keys without limits, and requests other than POST, never wait for the ledger.

While the ledger can't be reached, requests of limited keys get a 503: otherwise breaking the ledger
would lift every limit. Serve starts another ledger within seconds.
"""

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterator
from contextvars import Context
from typing import Any, Final, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.contract.errors import RateLimitError, RateLimitsUnavailableError, RaystreamError
from serve_app.backends.key_ledger import Ledger
from serve_app.config import ApiKey
from serve_app.http.errors import error_response
from serve_app.http.request_record import RequestRecord, record_of
from serve_app.keys.access import api_key_of
from serve_app.keys.ledger import Allowance, Verdict

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

LEDGER_TIMEOUT_S: Final = 5.0
"""Serve needs two or three seconds to start another ledger; a request may wait that long."""

SETTLE_TIMEOUT_S: Final = 1.0
"""Short, because the answer's last byte waits for it; a dead ledger has lost the request anyway."""

_REFUSALS: Final = {
    "requests": "The API key has used up its requests per minute.",
    "tokens": "The API key has used up its tokens per minute.",
    "streams": "The API key has as many requests running as it may at once.",
}


class RateLimitMiddleware:
    """Asks the ledger before each request, and settles after it."""

    def __init__(self, app: ASGIApp, ledger: Ledger, timeout_s: float = LEDGER_TIMEOUT_S) -> None:
        """Wrap an application.

        Args:
            app: The application. `AuthMiddleware` must have admitted its requests.
            ledger: Keeps the accounts.
            timeout_s: How long to wait for the ledger.
        """
        self._app = app
        self._ledger = ledger
        self._timeout_s = timeout_s
        # The event loop keeps only weak references to tasks.
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
        """Add the rate-limit headers, and settle before the last byte is sent.

        So a client that sends its requests one by one never has its previous one still counted.
        The shield keeps the message to the ledger alive if the client leaves at this very moment:
        its stream would otherwise count for an hour.
        """

        async def limited(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict(_headers(verdict)))
            elif not (running.is_settled or message.get("more_body", False)):
                await asyncio.shield(self._settle(running))
            await send(message)

        return limited


class _Running:
    """A request that the ledger has counted, or may have counted before its answer was lost.

    Attributes:
        is_settled: Whether the ledger knows, or is being notified, that the request has ended; also
            true if it needs no notice.
    """

    def __init__(self, ledger: Ledger, key: ApiKey, record: RequestRecord) -> None:
        """Start to ask the ledger about the request."""
        self.is_settled = False
        self._ledger = ledger
        self._key = key
        self._record = record
        # Not the request id: a client may use that twice.
        self._ticket = secrets.token_hex(16)
        self._admission = _start(ledger.admit(key.name, self._ticket))

    async def verdict(self) -> Verdict:
        """Return the ledger's verdict. Cancelling the caller does not cancel the call."""
        return await asyncio.shield(self._admission)

    async def settle(self) -> None:
        """Tell the ledger that the request has ended, after the ledger has admitted it."""
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await asyncio.gather(self._admission, return_exceptions=True)
                await self._ledger.settle(self._key.name, self._ticket, self._record.num_tokens)
        except (RaystreamError, TimeoutError) as error:
            logger.warning(
                "the key ledger missed the end of a request: %s", error or "no answer in time"
            )


def _start(message: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Send the ledger a message in a task that outlives its request.

    The task gets an empty context, because Serve finds a request's calls by its context and cancels
    them.
    """
    return asyncio.get_running_loop().create_task(message, context=Context())


def _refusal(verdict: Verdict) -> RateLimitError:
    assert verdict.refused_by is not None, "only refusals become errors"
    message = f"{_REFUSALS[verdict.refused_by]} Try again in {duration(verdict.retry_after_s)}."
    return RateLimitError(message, None, verdict.retry_after_s)


def _headers(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the headers that report a key's limits, named as OpenAI's are.

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
