"""Sends a request and returns its record, even if the request fails. Nothing is sent twice."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from pydantic_core import to_json
from yarl import URL

from loadtest.client.attempt import Attempt, Task
from loadtest.client.clock import Clock
from loadtest.client.contract import (
    CUT_OFF,
    Api,
    MalformedAnswerError,
    error_of,
    json_object,
    shortened,
)
from loadtest.client.failures import kind_of_exception, kind_of_status, timeout_message
from loadtest.client.observer import Observer
from loadtest.client.sse import OversizedEventError, SseDecoder
from loadtest.client.stamped_http import StampedBody, StampedResponse
from loadtest.client.watchdog import TimeLimits, Watchdog
from loadtest.results.record import ErrorKind, RequestRecord
from loadtest.results.redaction import HIDDEN

TAIL_S: Final = 5.0
"""How long a stream may stay open after its `[DONE]` before the connection is closed."""

MIN_SECRET_CHARS: Final = 3
"""A secret's first characters, up to this many, reveal nothing and are left in place."""

MAX_WHOLE_BYTES: Final = 64 * 1024 * 1024
"""The limit of an answer that is not a stream."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test.

    Attributes:
        url: The full URL of the route.
        headers: The configured headers, sent with each request.
        secrets: Texts to keep out of all files, even if the server repeats them.
    """

    url: URL
    headers: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()

    def without_secrets(self, text: str) -> str:
        """Return a text with every secret hidden."""
        for secret in self.secrets:
            text = _without_cut_secret(secret, text.replace(secret, HIDDEN))
        return text


def _without_cut_secret(secret: str, text: str) -> str:
    """Hide the beginning of a secret at the point where a text was shortened."""
    head = text.removesuffix(CUT_OFF)
    if head == text:
        return text
    begun = next(
        (n for n in range(len(secret), MIN_SECRET_CHARS, -1) if head.endswith(secret[:n])), 0
    )
    return text if not begun else f"{head[:-begun]}{HIDDEN}{CUT_OFF}"


class Sender:
    """Sends tasks to a target, any number of them at once."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        api: Api,
        limits: TimeLimits,
        clock: Clock,
        observer: Observer,
    ) -> None:
        """Prepare to send; `session` is a `stamped_session` with the same clock."""
        self._session = session
        self._target = target
        self._headers = _headers_for(api, target.headers)
        self._api = api
        self._limits = limits
        self._clock = clock
        self._observer = observer

    async def send(self, task: Task) -> RequestRecord:
        """Send a task and read its answer to the end.

        If cancelled, this still returns the record, with the error `cancelled`.
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
        """Return when the answer ended; None if it was not read to its end."""
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
            attempt.fail(kind, timeout_message(kind, self._limits))
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
            message = await _read_error(body)
            attempt.fail(kind, shortened(f"{response.status} {response.reason}: {message}"))
        elif not self._has_media_type(response.content_type):
            fault = f"an answer of type {response.content_type} instead of {self._api.media_type}"
            attempt.fail(ErrorKind.MALFORMED, shortened(f"{fault}: {await _read_error(body)}"))
        elif response.content_type == "application/json":
            await self._read_whole(body, attempt, watchdog)
        else:
            await self._read_stream(body, attempt, watchdog)
        self._check_complete(attempt)
        return body.ended_s

    def _has_media_type(self, media_type: str) -> bool:
        """Return whether the API sends answers of this type."""
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
                        self._report_content(attempt, time_s)
                    if attempt.error is not None:
                        return
                    if delta.is_done:
                        watchdog.disarm()
                        await _read_tail(body)
                        return

    async def _read_whole(self, body: StampedBody, attempt: Attempt, watchdog: Watchdog) -> None:
        payload = await read_text(body, MAX_WHOLE_BYTES)
        attempt.received_bytes = len(payload.encode())
        attempt.take(self._api.read_whole(payload), body.ended_s or self._clock())
        if attempt.content_s:
            watchdog.content_came()
            self._report_content(attempt, attempt.content_s[-1])

    def _report_content(self, attempt: Attempt, time_s: float) -> None:
        ttft_ms = attempt.ttft_ms if len(attempt.content_s) == 1 else None
        self._observer.content(time_s, attempt.num_last_tokens, ttft_ms)

    def _check_complete(self, attempt: Attempt) -> None:
        """Check whether an answer that ended without an error is complete and has content."""
        if not attempt.is_complete and not self._api.ends_by_closing:
            num_events = len(attempt.content_s)
            attempt.fail(
                ErrorKind.TRUNCATED,
                f"the stream ended after {num_events} content events, without [DONE] or a "
                "finish_reason",
            )
        if not attempt.content_s:
            attempt.fail(ErrorKind.EMPTY, "the answer is complete but holds no text")


def _headers_for(api: Api, given: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of each request; a given one replaces ours, whatever its case."""
    own = {
        "Accept": api.media_type or "text/event-stream, application/json",
        # Compression would merge events into blocks and change their times.
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "raystream-loadtest",
    }
    names = {name.lower() for name in given}
    return {name: value for name, value in own.items() if name.lower() not in names} | dict(given)


async def _read_tail(body: StampedBody) -> None:
    """Read the rest after `[DONE]`; errors don't matter, since the answer is complete."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(TAIL_S):
            while await body.reads():
                pass


async def read_text(body: StampedBody, max_bytes: int) -> str:
    """Read a body to its end.

    Raises:
        MalformedAnswerError: The body is longer than `max_bytes`.
        aiohttp.ClientError: The body broke off.
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
    """Return the message of an error's body: from its JSON, or else its text."""
    try:
        text = await read_text(body, 64 * 1024)
    except (aiohttp.ClientError, MalformedAnswerError):
        return "(the body can't be read)"
    with suppress(MalformedAnswerError):
        payload = json_object(text)
        return error_of(payload) or str(payload.get("detail") or text)
    return text
