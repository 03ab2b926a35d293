"""The spans of a model's work, by OpenTelemetry's conventions for generative AI.

An ingress records its calls to replicas and a replica its own work, each with the same attributes
as that process sees them. The attribute for the time in the queue is vLLM's, because the
conventions have none; those that begin with `raystream.` are ours.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from opentelemetry.trace import StatusCode

from deployments.contract.errors import (
    GenerationFailedError,
    ModelChangedError,
    OverloadedError,
    RaystreamError,
)
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, SequenceJournal, TextDelta
from deployments.contract.pooling import PoolingOperation, PoolingRequest
from deployments.contract.telemetry.tracing import Span, SpanKind, TraceContext, Tracer, context_of

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST: Final = "gen_ai.response.time_to_first_chunk"
TIME_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"
"""Both times are in seconds."""

ERROR: Final = "error.type"
REPLICA: Final = "raystream.replica.id"
MOVE_REASON: Final = "raystream.move.reason"

MOVED: Final = "moved"
REFUSED: Final = "refused"
PREEMPTED: Final = "preempted"
"""The names of events."""

PROVIDER_NAME: Final = "raystream"

Operation = Literal["chat", "text_completion"] | PoolingOperation
REFUSALS: Final = (OverloadedError, ModelChangedError)


def operation_of(prompt: Sequence[object] | str) -> Operation:
    """Return what a model does with a prompt: messages are a chat."""
    is_plain = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return "text_completion" if is_plain else "chat"


class ModelSpans:
    """Starts the spans of one model's work in this process."""

    def __init__(self, tracer: Tracer, model_id: str, kind: SpanKind) -> None:
        """Prepare for a model.

        Args:
            tracer: Starts the spans.
            model_id: The model, as clients name it.
            kind: CLIENT where replicas are called, SERVER in a replica.
        """
        self._tracer = tracer
        self._model_id = model_id
        self._kind = kind

    def of_text(self, request: GenerationRequest) -> "ModelSpan | None":
        """Start the span of one text; return None if its trace is not recorded."""
        return self._start(operation_of(request.prompt), request.trace)

    def of_texts(self, request: PoolingRequest) -> "ModelSpan | None":
        """Start the span of a pooling request; return None if its trace is not recorded."""
        return self._start(request.operation, request.trace)

    def _start(self, operation: Operation, parent: TraceContext | None) -> "ModelSpan | None":
        # Without a context there is no span above, so this one would be a trace by itself.
        if parent is None:
            return None
        known = {OPERATION: operation, PROVIDER: PROVIDER_NAME, MODEL: self._model_id}
        span = self._tracer.start(f"{operation} {self._model_id}", self._kind, parent, known)
        has_text = operation in ("chat", "text_completion")
        return None if span is None else ModelSpan(span, has_text=has_text, moved=parent.moved)


class ModelSpan:
    """The span of a call to a replica, or of a replica's work; nothing is noted after its end.

    Attributes:
        journal: Where the engine notes when the sequence began and was preempted.
    """

    def __init__(self, span: Span, *, has_text: bool = True, moved: str | None = None) -> None:
        """Take over a span that has started.

        Args:
            span: The span.
            has_text: Whether the answer is a text, which has tokens and an end.
            moved: Why the request has left another replica; None unless it has.
        """
        self.journal = SequenceJournal()
        self._started_ns = time.time_ns()
        self._span = span
        self._has_text = has_text
        self._moved = moved
        self._num_output_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._has_failed = False

    @property
    def context(self) -> TraceContext:
        """What the next hop needs."""
        return context_of(self._span)

    def accepted(self, num_input_tokens: int, replica_id: str | None = None) -> None:
        """Note that the replica runs the request.

        Args:
            num_input_tokens: Tokens of the prompt, or of all texts.
            replica_id: The replica; None in the replica itself, whose spans all name it.
        """
        if not self._span.is_recording():
            return
        self._span.set_attribute(INPUT_TOKENS, num_input_tokens)
        if replica_id is not None:
            self._span.set_attribute(REPLICA, replica_id)
            if self._moved is not None:
                self._span.add_event(MOVED, {MOVE_REASON: self._moved})

    def waited(self, seconds: float) -> None:
        """Note how long the request has waited for the device."""
        if self._span.is_recording():
            self._span.set_attribute(TIME_IN_QUEUE, seconds)

    def gained(self, delta: TextDelta) -> None:
        """Note what a text has gained."""
        if not self._span.is_recording():
            return
        if delta.token_ids and not self._num_output_tokens:
            self._span.set_attribute(TIME_TO_FIRST, self._seconds_until(time.time_ns()))
        if delta.num_cached_tokens:
            self._span.set_attribute(CACHED_TOKENS, delta.num_cached_tokens)
        self._num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self._has_failed = delta.error is not None

    def end(self, error: BaseException | None = None) -> None:
        """End the span; further calls do nothing.

        Args:
            error: Why there is no answer, or no whole one. A cancellation is not an error.
        """
        if not self._span.is_recording():
            return
        error = None if isinstance(error, asyncio.CancelledError | GeneratorExit) else error
        if isinstance(error, REFUSALS):
            self._span.add_event(REFUSED, {ERROR: _code_of(error)})
        self._add_journal()
        if error is not None:
            self._span.set_attribute(ERROR, _code_of(error))
        elif self._has_failed:
            self._span.set_attribute(ERROR, _code_of(GenerationFailedError("")))
        if self._has_text and not isinstance(error, REFUSALS):
            ended_by = FinishReason.ABORT if error is None else FinishReason.ERROR
            self._span.set_attribute(OUTPUT_TOKENS, self._num_output_tokens)
            self._span.set_attribute(FINISH_REASONS, ((self._finish_reason or ended_by).value,))
        if self._has_failed or _is_failure(error):
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _add_journal(self) -> None:
        journal = self.journal
        if journal.begun_ns is not None:
            self.waited(self._seconds_until(journal.begun_ns))
        for at_ns in journal.preempted_ns:
            self._span.add_event(PREEMPTED, timestamp=at_ns)

    def _seconds_until(self, at_ns: int) -> float:
        return max(0, at_ns - self._started_ns) / 1e9


@contextmanager
def recorded(span: ModelSpan | None) -> Iterator[ModelSpan | None]:
    """End a span with the block, and with the error that leaves it."""
    try:
        yield span
    except BaseException as error:
        end(span, error)
        raise
    end(span)


def end(span: ModelSpan | None, error: BaseException | None = None) -> None:
    """End a span, if there is one; see `ModelSpan.end`."""
    if span is not None:
        span.end(error)


def _code_of(error: BaseException) -> str:
    """Return a name for an error, which holds nothing of the request."""
    if isinstance(error, RaystreamError):
        return error.code or error.type
    return type(error).__name__


def _is_failure(error: BaseException | None) -> bool:
    """Return whether the server has failed; a client's mistake is no failure of the server."""
    if isinstance(error, RaystreamError):
        return error.status >= 500
    return error is not None
