import asyncio
import logging
import time
from collections.abc import Iterator

import pytest

from deployments.contract.errors import (
    GenerationFailedError,
    InvalidRequestError,
    ModelChangedError,
    OverloadedError,
    ReplicaUnavailableError,
)
from deployments.contract.gen_ai_spans import ModelSpan, ModelSpans, end, operation_of, recorded
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.pooling import PoolingRequest
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.telemetry.tracing import (
    SpanKind,
    TraceContext,
    TracingSettings,
    open_tracer,
)
from tests.otlp_receiver import ReceivedSpan, Receiver

TRACE = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
TEXT = GenerationRequest("r", "hello", SamplingParams(), trace=TRACE)


class Traced:
    """The spans of a model, and what a collector gets of them."""

    def __init__(self, receiver: Receiver) -> None:
        tracer = open_tracer(TracingSettings(receiver.url), "service", "instance")
        assert tracer is not None
        self.tracer = tracer
        self.spans = ModelSpans(tracer, "m", SpanKind.SERVER)
        self._receiver = receiver

    def started(self) -> ModelSpan:
        span = self.spans.of_text(TEXT)
        assert span is not None
        return span

    def received(self) -> ReceivedSpan:
        """Return the only span, which tells no secret."""
        self.tracer.close()
        (span,) = self._receiver.spans
        assert b"secret" not in self._receiver.bodies[0]
        return span


@pytest.fixture
def traced(receiver: Receiver) -> Iterator[Traced]:
    traced = Traced(receiver)
    yield traced
    traced.tracer.close()


@pytest.mark.parametrize(
    ("prompt", "operation"),
    [
        ("hello", "text_completion"),
        ((1, 2), "text_completion"),
        ((), "text_completion"),
        ((ChatMessage("user", (TextPart("hello"),)),), "chat"),
    ],
)
def test_messages_are_a_chat(
    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...], operation: str
) -> None:
    assert operation_of(prompt) == operation


def test_a_request_without_a_context_has_no_span(traced: Traced) -> None:
    assert traced.spans.of_text(GenerationRequest("r", "hello", SamplingParams())) is None
    assert traced.spans.of_texts(PoolingRequest("r", ("hello",))) is None


def test_a_text_s_span_counts_its_tokens_and_its_times(traced: Traced) -> None:
    span = traced.started()
    span.accepted(5)
    span.journal.begun_ns = time.time_ns() + 10**9
    span.gained(TextDelta((), ""))
    span.gained(TextDelta((1,), "a", num_cached_tokens=4))
    span.gained(TextDelta((2, 3), "b", FinishReason.LENGTH))
    span.end()
    span.end(GenerationFailedError("too late"))
    found = traced.received()
    assert (found.name, found.kind, found.has_failed) == ("text_completion m", 2, False)
    assert found.parent_id == "00f067aa0ba902b7"
    assert 1 <= found.attributes.pop("gen_ai.latency.time_in_queue") < 2
    assert 0 <= found.attributes.pop("gen_ai.response.time_to_first_chunk") < 1
    assert found.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "raystream",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert found.events == []


def test_what_comes_after_a_span_s_end_is_left_out_without_a_word(
    traced: Traced, thin_log: pytest.LogCaptureFixture
) -> None:
    span = traced.started()
    span.end()
    span.accepted(5, "replica")
    span.waited(1.0)
    span.gained(TextDelta((1,), "a", num_cached_tokens=4))
    assert "gen_ai.usage.input_tokens" not in traced.received().attributes
    assert [each for each in thin_log.records if each.levelno >= logging.WARNING] == []


def test_a_preemption_is_an_event_at_its_time(traced: Traced) -> None:
    span = traced.started()
    span.journal.preempted_ns += [1, 2]
    span.end()
    assert traced.received().events == [("preempted", {}), ("preempted", {})]


@pytest.mark.parametrize(
    ("error", "code"),
    [(OverloadedError("full"), "overloaded"), (ModelChangedError("other"), "model_changed")],
)
def test_a_refusal_is_an_event(traced: Traced, error: Exception, code: str) -> None:
    traced.started().end(error)
    found = traced.received()
    assert found.events == [("refused", {"error.type": code})]
    assert found.attributes["error.type"] == code
    assert found.has_failed
    assert "gen_ai.usage.output_tokens" not in found.attributes


@pytest.mark.parametrize(
    ("error", "code", "has_failed"),
    [
        (InvalidRequestError("secret"), "invalid_request", False),
        (ReplicaUnavailableError("secret"), "replica_unavailable", True),
        (ZeroDivisionError("secret"), "ZeroDivisionError", True),
    ],
)
def test_an_error_is_named_by_its_code(
    traced: Traced, error: Exception, code: str, has_failed: bool
) -> None:
    with pytest.raises(type(error)), recorded(traced.started()):
        raise error
    found = traced.received()
    assert (found.attributes["error.type"], found.has_failed) == (code, has_failed)
    assert found.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_prompt_without_an_answer_has_its_cached_tokens_in_its_span(traced: Traced) -> None:
    span = traced.started()
    span.gained(TextDelta((), "", FinishReason.LENGTH, num_cached_tokens=4))
    span.end()
    found = traced.received().attributes
    assert found["gen_ai.usage.cache_read.input_tokens"] == 4
    assert "gen_ai.response.time_to_first_chunk" not in found


def test_a_sequence_that_fails_in_the_engine_fails_its_span(traced: Traced) -> None:
    span = traced.started()
    span.gained(TextDelta((), "", FinishReason.ERROR, "secret"))
    end(span)
    found = traced.received()
    assert (found.attributes["error.type"], found.has_failed) == ("generation_failed", True)


def test_a_cancelled_text_is_aborted_without_an_error(traced: Traced) -> None:
    with pytest.raises(asyncio.CancelledError), recorded(traced.started()):
        raise asyncio.CancelledError
    found = traced.received()
    assert found.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert "error.type" not in found.attributes
    assert not found.has_failed


def test_a_classification_has_no_finish_reason(traced: Traced) -> None:
    with recorded(traced.spans.of_texts(PoolingRequest("r", ("hello",), trace=TRACE))) as span:
        assert span is not None
        span.accepted(9)
        span.waited(0.25)
    found = traced.received()
    assert found.name == "classify m"
    assert found.attributes == {
        "gen_ai.operation.name": "classify",
        "gen_ai.provider.name": "raystream",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.latency.time_in_queue": 0.25,
    }
