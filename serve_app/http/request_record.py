"""The record of one request: what is known of it while it is answered.

Surfaces and backends fill it in; the access log, the metrics, the span and the answer to an error
are made from it. `current_record` finds it from any task that works for the request.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from opentelemetry.trace import format_trace_id
from pydantic_core import to_json
from starlette.types import Scope

from deployments.contract.claims import Claim
from deployments.contract.errors import OverloadReason
from deployments.contract.gen_ai_spans import MOVE_REASON, MOVED
from deployments.contract.telemetry.metric_store import Counter
from deployments.contract.telemetry.tracing import Span, TraceContext, context_of
from serve_app.http.error_shapes import ErrorShape, openai_error
from serve_app.http.standing import ANYONE, Standing

CLIENT_DISCONNECTED: Final = "client_disconnected"


class MoveReason(StrEnum):
    """Why another replica has taken over."""

    LOST = "lost"
    """The replica died, hung or could not be reached."""

    STOPPED = "stopped"
    """Serve had stopped the replica."""

    DRAINED = "drained"
    """The replica was about to end, and the stream left it before."""


class Meter(Protocol):
    """Counts what is added to the records of all requests."""

    def count_prompt(self, record: "RequestRecord", num_tokens: int) -> None:
        """Count a prompt that a replica has accepted."""
        ...

    def delivered_tokens(self, record: "RequestRecord") -> Counter:
        """Return what counts the tokens of an answer that were handed to the HTTP server."""
        ...

    def count_move(self, record: "RequestRecord", reason: MoveReason) -> None:
        """Count a stream, or another request, that has moved to another replica."""
        ...

    def parked(self, record: "RequestRecord") -> AbstractContextManager[None]:
        """Count a stream as parked while the block runs."""
        ...

    def count_refusal(self, record: "RequestRecord", reason: OverloadReason) -> None:
        """Count a request whose client is told that there is no room for it."""
        ...


@dataclass(slots=True)
class RequestRecord:
    """The facts known about one request so far.

    Attributes:
        request_id: The request's id.
        method: The HTTP method.
        now: Returns seconds that never run backwards.
        started_s: When the request arrived, by `now`.
        route: The path of our own route, with its parameters' names in place of the client's
            values; None if there is no such route, and for HEAD.
        key_name: The name of the API key that let the request in.
        standing: Whose the request is, and how soon it may run.
        model: The model that was asked.
        num_prompt_tokens: Counted by the replica, once for each prompt, not for each answer.
        num_completion_tokens: Tokens of all answers.
        num_delivered_tokens: Those of them that were handed to the HTTP server, for this request or
            an earlier one that it resumes.
        first_token_s: When the first token of any answer came.
        finish_reason: The reason that the client was given for the answer that finished last.
        error_code: Why the answer is missing or incomplete.
        status: The HTTP status; None while no answer has begun.
        is_answered: Whether the last byte was handed to the server.
        has_left: Whether the client left before that, and before anything had failed.
        warnings: What the client asked for and will not get; the answer's header tells.
        num_moves: How often another replica took over after a loss, over all answers.
        num_deaths: Replicas that were lost while they may have run it, over all answers.
        num_parked: How often a stream was parked, over all answers.
        operation: What the model was asked to do, as traces name it.
        span: The request's span; None if its trace is not recorded.
        on_notice: Takes the notices for the client; a streamed answer sets it while it sends.
        error_shape: How the client is told of an error.
        meter: Counts tokens, moves and refusals over all requests; None counts nothing.
    """

    request_id: str
    method: str
    now: Callable[[], float]
    started_s: float
    route: str | None = None
    key_name: str | None = None
    standing: Standing = ANYONE
    model: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_delivered_tokens: int = 0
    first_token_s: float | None = None
    finish_reason: str | None = None
    error_code: str | None = None
    status: int | None = None
    is_answered: bool = False
    has_left: bool = False
    warnings: tuple[str, ...] = ()
    num_moves: int = 0
    num_deaths: int = 0
    num_parked: int = 0
    operation: str | None = None
    span: Span | None = None
    on_notice: Callable[[str], object] = lambda notice: None
    error_shape: ErrorShape = openai_error
    meter: Meter | None = None
    _delivered_tokens: Counter | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.num_prompt_tokens + self.num_completion_tokens

    def opened(self, num_prompt_tokens: int) -> None:
        """Note that a replica has accepted a prompt."""
        self.num_prompt_tokens += num_prompt_tokens
        if self.meter is not None:
            self.meter.count_prompt(self, num_prompt_tokens)

    def gained(self, num_tokens: int, finish_reason: str | None) -> None:
        """Note tokens of an answer."""
        if self.first_token_s is None and num_tokens:
            self.first_token_s = self.now()
        self.num_completion_tokens += num_tokens
        if finish_reason is not None:
            self.finish_reason = finish_reason

    def delivered(self) -> None:
        """Note that all tokens so far were handed to the HTTP server."""
        num_tokens = self.num_completion_tokens - self.num_delivered_tokens
        self.num_delivered_tokens = self.num_completion_tokens
        if num_tokens and self.meter is not None:
            if self._delivered_tokens is None:  # found once: each event passes here
                self._delivered_tokens = self.meter.delivered_tokens(self)
            self._delivered_tokens.inc(num_tokens)

    def regained(self, num_tokens: int) -> None:
        """Note that the client had got the latest tokens before, in a stream that it resumes."""
        self.num_delivered_tokens += num_tokens

    def moved(self, reason: MoveReason) -> None:
        """Note that another replica has taken over."""
        self.num_moves += 1
        if self.meter is not None:
            self.meter.count_move(self, reason)
        if self.span is not None:
            self.span.add_event(MOVED, {MOVE_REASON: reason})

    def parked(self) -> AbstractContextManager[None]:
        """Note that a stream of the request is parked while the block runs."""
        self.num_parked += 1
        return nullcontext() if self.meter is None else self.meter.parked(self)

    def failed(self, code: str | None, overload: OverloadReason | None = None) -> None:
        """Note the error that broke an answer; see `refused`."""
        if self.refused(code, overload):
            self.finish_reason = "error"

    def refused(self, code: str | None, overload: OverloadReason | None = None) -> bool:
        """Note why there is no answer; return False if the client had already left.

        Args:
            code: The error's code.
            overload: The limit that was reached; None if the error tells of no overload.
        """
        if self.has_left:
            return False
        # A whole answer's error passes here twice: where its text breaks, and as the answer.
        if overload is not None and self.error_code is None and self.meter is not None:
            self.meter.count_refusal(self, overload)
        self.error_code = code
        return True

    def left(self) -> None:
        """Note that the client has left, unless its answer was complete or had failed by then.

        Serve then also cancels the calls to replicas, and they fail as if the replicas had died.
        """
        if not self.is_answered and self.error_code is None:
            self.abandoned()

    def abandoned(self) -> None:
        """Note that the client had left before anything failed, even if that is known only now."""
        self.has_left, self.error_code = True, None

    def line(self) -> str:
        """Return the access log's line."""
        trace = {}
        if self.span is not None:
            trace["trace_id"] = format_trace_id(self.span.get_span_context().trace_id)
        return to_json(
            {
                "event": "request",
                "request_id": self.request_id,
                **trace,
                "key": self.key_name,
                "method": self.method,
                "route": self.route,
                "model": self.model,
                "status": self.status,
                "finish_reason": self.finish_reason,
                "error_code": self.error_code,
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self.num_completion_tokens,
                "moves": self.num_moves,
                "parked": self.num_parked,
                "ttft_ms": _ms(self.first_token_s, self.started_s),
                "duration_ms": _ms(self.now(), self.started_s),
            }
        ).decode()


CURRENT_RECORD: Final[ContextVar[RequestRecord | None]] = ContextVar("request_record", default=None)
"""The record of the request that the current task works for; set by `AccessLogMiddleware`."""


def current_record() -> RequestRecord | None:
    """Return the record of this task's request; tasks inherit it from the task that made them."""
    return CURRENT_RECORD.get()


def seconds_since_arrival() -> float:
    """Return the age of this task's request; 0 if there is none."""
    record = current_record()
    return 0.0 if record is None else record.now() - record.started_s


def claim_of_request(priority: int | None) -> Claim:
    """Return what this task's request claims of a replica.

    Args:
        priority: The priority that its body names; None takes that of its standing.

    Raises:
        InvalidRequestError: The priority is better than the request may have.
    """
    record = current_record()
    return (ANYONE if record is None else record.standing).claim(priority)


def note_model(model_id: str) -> None:
    """Note which model a request is for."""
    record = current_record()
    if record is not None:
        record.model = model_id


def note_prompt(num_prompt_tokens: int) -> None:
    """Note that a replica has accepted a request's prompts."""
    record = current_record()
    if record is not None:
        record.opened(num_prompt_tokens)


def note_operation(operation: str) -> TraceContext | None:
    """Note what a model is asked to do; return what the spans of its replicas belong under."""
    record = current_record()
    if record is None:
        return None
    record.operation = operation
    return None if record.span is None else context_of(record.span)


def note_warnings(warnings: tuple[str, ...]) -> None:
    """Note what the client asked for and will not get."""
    record = current_record()
    if record is not None:
        record.warnings += warnings


def note_finish(reason: str) -> None:
    """Note why an answer ended if its text does not show it, as when it ends with tool calls."""
    record = current_record()
    if record is not None:
        record.finish_reason = reason


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request."""
    record: RequestRecord = scope["state"]["request_record"]
    return record


def _ms(moment_s: float | None, since_s: float) -> float | None:
    return None if moment_s is None else round((moment_s - since_s) * 1000, 1)
