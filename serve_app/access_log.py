"""One line of JSON for each request, written when its answer has ended, however it ended.

A line tells who asked which model, how many tokens it took and how long. It never holds a prompt,
an answer, a key, or a path that a client made up: what is logged are numbers, and names that we
have given. `RequestRecord` is what the line is made of; the surfaces fill it while they work, and
the rate limits settle by it.

The logger is a child of Ray Serve's, so the lines stand in the ingress's log file and on its
standard error, and `logging_config` of serve_config.yaml decides on their frame.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import RaystreamError

logger = logging.getLogger("ray.serve.raystream.access")

CLIENT_DISCONNECTED: Final = "client_disconnected"


@dataclass(slots=True)
class RequestRecord:
    """What is known of one request so far.

    Attributes:
        request_id: Its name.
        method: HTTP's.
        route: The path as our own route has it, with the names of its parameters and not what a
            client put there; None where there is no such route, and for HEAD.
        now: Tells seconds that never run backwards.
        started_s: When it came, by `now`.
        key_name: Whose API key let it in.
        model: Which model was asked.
        num_prompt_tokens: Counted by the replica, once for each prompt, not for each answer.
        num_completion_tokens: Of all answers.
        first_token_s: When the first token of any answer came.
        finish_reason: Of the answer that finished last, as the client was told.
        error_code: Why there is no answer, or not all of it.
        status: HTTP's; None while no answer has begun.
        is_answered: Whether the last byte was handed to the server.
        has_left: Whether the client left before that, and before anything had failed.
    """

    request_id: str
    method: str
    now: Callable[[], float]
    started_s: float
    route: str | None = None
    key_name: str | None = None
    model: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    first_token_s: float | None = None
    finish_reason: str | None = None
    error_code: str | None = None
    status: int | None = None
    is_answered: bool = False
    has_left: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.num_prompt_tokens + self.num_completion_tokens

    def opened(self, num_prompt_tokens: int) -> None:
        """Note that a replica has accepted a prompt."""
        self.num_prompt_tokens += num_prompt_tokens

    def gained(self, num_tokens: int, finish_reason: str | None) -> None:
        """Note tokens of an answer."""
        if self.first_token_s is None and num_tokens:
            self.first_token_s = self.now()
        self.num_completion_tokens += num_tokens
        if finish_reason is not None:
            self.finish_reason = finish_reason

    def failed(self, code: str | None) -> None:
        """Note what broke an answer, by its error's code."""
        if self.refused(code):
            self.finish_reason = "error"

    def refused(self, code: str | None) -> bool:
        """Note why there is no answer; return False if nobody waits for one any more."""
        if not self.has_left:
            self.error_code = code
        return not self.has_left

    def left(self) -> None:
        """Note that the client has left, unless there was nothing left to wait for.

        Serve then cancels the calls of replicas, too, and they fail as if the replicas had died.
        """
        if not self.is_answered and self.error_code is None:
            self.abandoned()

    def abandoned(self) -> None:
        """Note that the client had left before anything failed, though it is known only now."""
        self.has_left, self.error_code = True, None

    def line(self) -> str:
        """Return the line of the log."""
        return to_json(
            {
                "event": "request",
                "request_id": self.request_id,
                "key": self.key_name,
                "method": self.method,
                "route": self.route,
                "model": self.model,
                "status": self.status,
                "finish_reason": self.finish_reason,
                "error_code": self.error_code,
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self.num_completion_tokens,
                "ttft_ms": _ms(self.first_token_s, self.started_s),
                "duration_ms": _ms(self.now(), self.started_s),
            }
        ).decode()


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current_record() -> RequestRecord | None:
    """Return the record of the request that this task, or the one that started it, works for."""
    return _current.get()


def seconds_since_arrival() -> float:
    """Return how old the request is that this task works for; 0 without one."""
    record = current_record()
    return 0.0 if record is None else record.now() - record.started_s


def note_finish(reason: str) -> None:
    """Note why an answer ended where its text alone did not tell: for its calls of tools."""
    record = current_record()
    if record is not None:
        record.finish_reason = reason


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request."""
    record: RequestRecord = scope["state"]["record"]
    return record


class AccessLogMiddleware:
    """Opens a request's record, and writes its line at the end."""

    def __init__(
        self, app: ASGIApp, writes: bool = True, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Wrap an application.

        Args:
            app: What is wrapped. Requests must have their ids by now.
            writes: Whether lines are written; records are kept anyway.
            now: Tells seconds that never run backwards.
        """
        self._app = app
        self._writes = writes
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and watch how it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        record = RequestRecord(state["request_id"], scope["method"][:16], self._now, self._now())
        state["record"] = record
        token = _current.set(record)
        try:
            await self._app(scope, _listening(receive, record), _watched(send, record))
        except asyncio.CancelledError:
            record.left()  # Serve cancels a request for no other reason
            raise
        except BaseException:
            record.status, record.is_answered = 500, True
            record.failed(RaystreamError.code)
            raise
        finally:
            _current.reset(token)
            record.route = getattr(scope.get("route"), "path", None)
            if self._writes:
                _write(record)


def _listening(receive: Receive, record: RequestRecord) -> Receive:
    async def listening() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect":
            record.left()
        return message

    return listening


def _watched(send: Send, record: RequestRecord) -> Send:
    def watched(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            record.status = message["status"]
        elif not message.get("more_body", False):
            record.is_answered = True
        return send(message)

    return watched


def _write(record: RequestRecord) -> None:
    if record.has_left or not (record.is_answered or record.error_code):
        record.finish_reason = CLIENT_DISCONNECTED
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", record.line())


def _ms(moment_s: float | None, since_s: float) -> float | None:
    return None if moment_s is None else round((moment_s - since_s) * 1000, 1)
