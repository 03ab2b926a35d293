import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.contract.tracing import (
    SpanKind,
    TraceContext,
    Tracer,
    TracingSettings,
    _is_sampled,
    _parsed,
    open_tracer,
)
from tests.otlp_receiver import Receiver

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"

LISTS_MODULES = """
import sys, threading
from deployments.contract.tracing import open_tracer
assert open_tracer(None, "service", "instance") is None
print(*sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
print(*(thread.name for thread in threading.enumerate()))
"""


@contextmanager
def traced(url: str, sample_ratio: float = 1.0) -> Iterator[Tracer]:
    tracer = open_tracer(TracingSettings(url, sample_ratio), "service", "instance")
    assert tracer is not None
    try:
        yield tracer
    finally:
        tracer.close()


def has_warnings(caplog: pytest.LogCaptureFixture) -> bool:
    return any(each.levelno >= logging.WARNING for each in caplog.records)


def loaded_modules(statement: str) -> tuple[list[str], list[str]]:
    """Return the modules of OpenTelemetry, and the threads, of a process with tracing off."""
    command = [sys.executable, "-c", statement + LISTS_MODULES]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    modules, threads = output.splitlines()[-2:]
    return modules.split(), threads.split()


def test_without_an_endpoint_our_code_does_not_import_the_sdk() -> None:
    modules, threads = loaded_modules(
        "import deployments.contract.gen_ai_spans, serve_app.middleware.tracing, serve_app.config"
    )
    assert not [name for name in modules if name.startswith("opentelemetry.sdk")]
    assert threads == ["MainThread"]


@pytest.mark.slow
def test_without_an_endpoint_neither_ingress_nor_replica_imports_the_exporter() -> None:
    # Ray Serve itself imports the SDK.
    modules, threads = loaded_modules("import serve_app.ingress, deployments.text_generator")
    assert not [name for name in modules if name.startswith("opentelemetry.exporter.otlp")]
    assert not [name for name in threads if name.startswith("Otel")]


def test_a_span_goes_to_the_collector_with_its_headers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with traced(f"{receiver.url}/") as tracer:
        parent = TraceContext(PARENT, "other=1,vendor=a")
        span = tracer.start("work", SpanKind.CLIENT, parent, {"first": 1})
        assert span is not None
        assert span.trace_id == TRACE_ID
        assert span.context.tracestate == "other=1,vendor=a"
        span.add_event("happened", {"why": "so"})
        span.end({"second": ("a", "b")}, name="work done", failed=True)
    (found,) = receiver.spans
    assert span.context.traceparent == f"00-{TRACE_ID}-{found.span_id}-01"
    assert receiver.headers[0]["x-key"] == "secret"
    assert (found.name, found.kind, found.has_failed) == ("work done", 3, True)
    assert (found.trace_id, found.parent_id) == (TRACE_ID, PARENT_ID)
    assert found.tracestate == "other=1,vendor=a"
    assert (found.service, found.instance_id) == ("service", "instance")
    assert found.attributes == {"first": 1, "second": ["a", "b"]}
    assert found.events == [("happened", {"why": "so"})]


INVALID_PARENTS = (
    "",
    "nonsense",
    PARENT[:-1],
    PARENT.upper(),
    f"{PARENT}-more",
    f"ff{PARENT[2:]}",
    f"00-{'0' * 32}-{PARENT_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"cc{PARENT[2:]}-{'a' * 100_000}",
    "00-\x00\xff" + "é" * 40,
)


def test_a_parent_that_is_not_valid_begins_a_new_trace(
    receiver: Receiver, thin_log: pytest.LogCaptureFixture
) -> None:
    with traced(receiver.url) as tracer:
        for parent in INVALID_PARENTS:
            context = TraceContext(parent, "a=1")
            span = tracer.start(ascii(parent[:99]), SpanKind.SERVER, context, {})
            assert span is not None, parent
            span.end({})
    found = {span.name: (span.parent_id, span.trace_id == TRACE_ID) for span in receiver.spans}
    assert found == {ascii(parent[:99]): ("", False) for parent in INVALID_PARENTS}
    assert not has_warnings(thin_log)


def test_a_tracestate_that_is_not_valid_is_left_out(
    receiver: Receiver, thin_log: pytest.LogCaptureFixture
) -> None:
    tracestates = ("=", "a=1,a=2", "a" * 600 + "=1", "\x00", "a=é")
    with traced(receiver.url) as tracer:
        for tracestate in tracestates:
            context = TraceContext(PARENT, tracestate)
            span = tracer.start(ascii(tracestate), SpanKind.SERVER, context, {})
            assert span is not None, tracestate
            span.end({})
    found = {span.name: (span.trace_id, span.tracestate) for span in receiver.spans}
    assert found == {ascii(tracestate): (TRACE_ID, "") for tracestate in tracestates}
    assert not has_warnings(thin_log)


def test_a_parent_decides_whether_a_span_is_recorded_and_else_the_ratio(
    receiver: Receiver,
) -> None:
    def is_recorded(tracer: Tracer, parent: str | None) -> bool:
        context = None if parent is None else TraceContext(parent)
        return tracer.start("work", SpanKind.SERVER, context, {}) is not None

    with traced(receiver.url, sample_ratio=0) as none, traced(receiver.url) as all_:
        assert [is_recorded(none, each) for each in (PARENT, UNSAMPLED, None)] == [
            True,
            False,
            False,
        ]
        assert [is_recorded(all_, each) for each in (PARENT, UNSAMPLED, None)] == [
            True,
            False,
            True,
        ]


PARTS = st.sampled_from(
    ["00", "cc", "ff", "0", "zz", TRACE_ID, PARENT_ID, "0" * 32, "0" * 16, "01"]
)


@given(
    st.builds("-".join, st.lists(PARTS, max_size=6))
    | st.builds(
        "{}-{}-{}-{}{}".format,
        st.sampled_from(["00", "01", "cc", "ff", "0G"]),
        st.sampled_from([TRACE_ID, "0" * 32, TRACE_ID.upper()]),
        st.sampled_from([PARENT_ID, "0" * 16]),
        st.sampled_from(["00", "01", "02", "03", "ff", "1"]),
        st.sampled_from(["", "-", "-more", "more"]),
    ),
    st.sampled_from(["", "a=1", "a=1,b=2", "a=1, b=2", "a=1,a=2", "=", "a@b=c"]),
)
def test_a_context_is_read_as_the_api_s_propagator_reads_it(parent: str, state: str) -> None:
    carrier = {"traceparent": parent} | ({"tracestate": state} if state else {})
    extracted = TraceContextTextMapPropagator().extract(carrier, Context())
    expected = get_current_span(extracted).get_span_context()
    found = _parsed(TraceContext(parent, state))
    if not expected.is_valid:
        assert found is None
    else:
        assert found is not None
        assert (found.trace_id, found.span_id) == (expected.trace_id, expected.span_id)
        assert found.trace_flags == expected.trace_flags & 3
        assert found.trace_state == expected.trace_state


def test_the_ratio_samples_the_ids_that_the_sdk_samples() -> None:
    sampler, rest = TraceIdRatioBased(0.25), 2**64 - 1
    for trace_id in (0, 1 << 62, (1 << 62) - 1, rest, 7 << 64, (7 << 64) + (1 << 62)):
        decision = sampler.should_sample(None, trace_id, "").decision
        assert _is_sampled(trace_id, 0.25) == (decision is Decision.RECORD_AND_SAMPLE)
