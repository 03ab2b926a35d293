"""Sends one request and makes its record, whatever happens. It never sends one twice."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from pydantic_core import to_json
from yarl import URL

from loadtest.apis.contract import (
    CUT_OFF,
    Api,
    MalformedAnswerError,
    error_of,
    json_object,
    shortened,
)
from loadtest.attempt import Attempt, Task
from loadtest.failures import kind_of_exception, kind_of_status
from loadtest.observer import Observer
from loadtest.record import ErrorKind, RequestRecord
from loadtest.redaction import HIDDEN
from loadtest.run_clock import Clock
from loadtest.sse import OversizedEventError, SseDecoder
from loadtest.stamped_http import StampedBody, StampedResponse
from loadtest.watchdog import TimeLimits, Watchdog

TAIL_S: Final = 5.0
"""How long a stream may stay open behind its `[DONE]`; then the connection is given up."""

MIN_SECRET_CHARS: Final = 3
"""So much of a secret's beginning tells nothing."""

MAX_WHOLE_BYTES: Final = 64 * 1024 * 1024
"""Of an answer that is no stream."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        url: The whole address.
        headers: Sent with each request, beside those of HTTP.
        secrets: What must never be written down, even if the server repeats it.
    """

    url: URL
    headers: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()

    def without_secrets(self, text: str) -> str:
        """Return a text with every secret blotted out."""
        for secret in self.secrets:
            text = _without_cut_off(secret, text.replace(secret, HIDDEN))
        return text


def _without_cut_off(secret: str, text: str) -> str:
    """Blot out a secret's beginning where a shortened text breaks off in the middle of it."""
    head = text.removesuffix(CUT_OFF)
    if head == text:
        return text
    begun = next(
        (n for n in range(len(secret), MIN_SECRET_CHARS, -1) if head.endswith(secret[:n])), 0
    )
    return text if not begun else f"{head[:-begun]}{HIDDEN}{CUT_OFF}"


class Sender:
    """Sends tasks to a target; any number at once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        api: Api,
        limits: TimeLimits,
        clock: Clock,
        observer: Observer,
    ) -> None:
        """Keep them; the session is a `stamped_session` of the same clock."""
        self._session = session
        self._target = target
        self._headers = _headers_for(api, target.headers)
        self._api = api
        self._limits = limits
        self._clock = clock
        self._observer = observer

    async def send(self, task: Task) -> RequestRecord:
        """Send a task and read its answer to the end.

        Whoever cancels this gets the record too, as one that the tool ended itself.
        """
        body = to_json(self._api.body(task.call))
        attempt = Attempt(task, sent_s=self._clock())
        self._observer.started(attempt.sent_s)
        ended_s = await self._exchange(attempt, body)
        if attempt.error_message is not None:
            attempt.error_message = self._target.without_secrets(attempt.error_message)
        record = attempt.record(self._clock() if ended_s is None else ended_s)
        self._observer.ended(record)
        return record

    async def _exchange(self, attempt: Attempt, body: bytes) -> float | None:
        """Return when the answer ended, if it came to its end."""
        watchdog = Watchdog(self._limits)
        try:
            async with (
                watchdog,
                self._session.post(
                    self._target.url, data=body, headers=self._headers, allow_redirects=False
                ) as response,
            ):
                assert isinstance(response, StampedResponse)
                return await self._read(response, attempt, watchdog)
        except asyncio.CancelledError:
            if not attempt.is_complete:
                attempt.fail(ErrorKind.CANCELLED, "ended by the load tester")
        except TimeoutError:
            kind = watchdog.expired or ErrorKind.CONNECT
            attempt.fail(kind, _said_of_timeout(kind, self._limits))
        except (MalformedAnswerError, OversizedEventError) as error:
            attempt.fail(ErrorKind.MALFORMED, str(error))
        except (aiohttp.ClientError, OSError) as error:
            is_answered = attempt.http_status is not None
            kind = kind_of_exception(error, is_answered=is_answered)
            attempt.fail(kind, shortened(f"{type(error).__name__}: {error}"))
        return None

    async def _read(
        self, response: StampedResponse, attempt: Attempt, watchdog: Watchdog
    ) -> float | None:
        body = response.body_reads
        attempt.http_status, attempt.headers_s = response.status, body.started_s
        if (kind := kind_of_status(response.status)) is not None:
            said = await _read_error(body)
            attempt.fail(kind, shortened(f"{response.status} {response.reason}: {said}"))
        elif not self._is_wanted(response.content_type):
            told = f"an answer of type {response.content_type} instead of {self._api.media_type}"
            attempt.fail(ErrorKind.MALFORMED, shortened(f"{told}: {await _read_error(body)}"))
        elif response.content_type == "application/json":
            await self._read_whole(body, attempt, watchdog)
        else:
            await self._read_stream(body, attempt, watchdog)
        self._judge(attempt)
        return body.ended_s

    def _is_wanted(self, media_type: str) -> bool:
        """Say whether an answer is what the API gives, from what it says to be."""
        return self._api.media_type in (None, media_type)

    async def _read_stream(self, body: StampedBody, attempt: Attempt, watchdog: Watchdog) -> None:
        decoder = SseDecoder()
        while reads := await body.reads():
            for time_s, piece in reads:
                attempt.received_bytes += len(piece)
                for event in decoder.feed(piece):
                    delta = self._api.read_event(event)
                    attempt.take(delta, time_s)
                    if delta.text:
                        watchdog.content_came()
                        self._tell(attempt, time_s)
                    if attempt.error is not None:
                        return
                    if delta.is_done:
                        watchdog.stand_down()
                        await _read_tail(body)
                        return

    async def _read_whole(self, body: StampedBody, attempt: Attempt, watchdog: Watchdog) -> None:
        payload = await read_text(body, MAX_WHOLE_BYTES)
        attempt.received_bytes = len(payload.encode())
        attempt.take(self._api.read_whole(payload), body.ended_s or self._clock())
        if attempt.content_s:
            watchdog.content_came()
            self._tell(attempt, attempt.content_s[-1])

    def _tell(self, attempt: Attempt, time_s: float) -> None:
        ttft_ms = attempt.ttft_ms if len(attempt.content_s) == 1 else None
        self._observer.content(time_s, attempt.num_last_tokens, ttft_ms)

    def _judge(self, attempt: Attempt) -> None:
        """Say what is wrong with an answer that came to its end without an error."""
        if not attempt.is_complete and not self._api.ends_by_closing:
            num_events = len(attempt.content_s)
            attempt.fail(
                ErrorKind.TRUNCATED,
                f"the stream ended after {num_events} content events, without [DONE] or a "
                "finish_reason",
            )
        if not attempt.content_s:
            attempt.fail(ErrorKind.EMPTY, "the answer is complete and holds no text")


def _headers_for(api: Api, given: Mapping[str, str]) -> dict[str, str]:
    """Return what is sent with each request; a given header replaces ours in whatever case."""
    own = {
        "Accept": api.media_type or "text/event-stream, application/json",
        # What is compressed comes in blocks, and at other times than the server sent it.
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "raystream-loadtest",
    }
    names = {name.lower() for name in given}
    return {name: value for name, value in own.items() if name.lower() not in names} | dict(given)


def _said_of_timeout(kind: ErrorKind, limits: TimeLimits) -> str:
    match kind:
        case ErrorKind.TIMEOUT_FIRST:
            return f"no content within {limits.first_token_s:g} s"
        case ErrorKind.TIMEOUT_STALL:
            return f"no further content for {limits.stall_s:g} s"
        case ErrorKind.TIMEOUT_TOTAL:
            return f"not complete within {limits.total_s:g} s"
        case _:
            return "the operating system gave up connecting"


async def _read_tail(body: StampedBody) -> None:
    """Read to the end behind `[DONE]`; the answer is whole, whatever the connection does."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(TAIL_S):
            while await body.reads():
                pass


async def read_text(body: StampedBody, max_bytes: int) -> str:
    """Read a body to its end.

    Raises:
        MalformedAnswerError: It is longer.
        aiohttp.ClientError: It broke off.
    """
    pieces: list[bytes] = []
    num_bytes = 0
    while reads := await body.reads():
        pieces += [read.piece for read in reads]
        num_bytes += sum(len(read.piece) for read in reads)
        if num_bytes > max_bytes:
            raise MalformedAnswerError(f"an answer of more than {max_bytes} bytes")
    return b"".join(pieces).decode("utf-8", "replace")


async def _read_error(body: StampedBody) -> str:
    """Return what an error's body says: its JSON's message, or else its text."""
    try:
        text = await read_text(body, 64 * 1024)
    except (aiohttp.ClientError, MalformedAnswerError):
        return "(its body can't be read)"
    with suppress(MalformedAnswerError):
        payload = json_object(text)
        return error_of(payload) or str(payload.get("detail") or text)
    return text
