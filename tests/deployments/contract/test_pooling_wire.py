import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.channel.wire import (
    FrameReader,
    WireError,
    encode_frame,
    encode_go_ahead,
    encode_message,
    is_of_call,
)
from deployments.contract.claims import Claim
from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    OverloadReason,
    PoolingFailedError,
    RaystreamError,
    overload_reason,
)
from deployments.contract.generation import Refused
from deployments.contract.pooling import Asleep, Pooled, PooledText, PoolingRequest, TextPair
from deployments.contract.pooling_wire import (
    GOODBYE,
    MAX_CALL_BYTES,
    MAX_NUM_TEXTS,
    CallAnswer,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
    encode_departure,
)
from deployments.contract.telemetry.tracing import TraceContext
from serve_app.http.request_record import MoveReason
from tests.offenders import for_each

NUMBERS = st.integers(0, 2**63)
COUNTS = st.integers(0, 2**31)
WORDS = st.text(st.characters(codec=None), max_size=20)  # lone surrogates, too
SECONDS = st.floats(0, 1e9)
INPUTS = WORDS | st.builds(TextPair, WORDS, WORDS) | st.lists(COUNTS, max_size=4).map(tuple)
REQUESTS = st.builds(
    PoolingRequest,
    WORDS,
    st.lists(INPUTS, max_size=4).map(tuple),
    st.booleans(),
    st.none() | COUNTS,
    st.none() | COUNTS,
    COUNTS,
    st.sampled_from(["classify", "embeddings", "rerank", "score"]),
    trace=st.none()
    | st.builds(TraceContext, WORDS, WORDS, st.none() | st.sampled_from(MoveReason)),
    elapsed_s=SECONDS,
    claim=st.builds(Claim, st.integers(-100, 100), WORDS, SECONDS, SECONDS, SECONDS, WORDS, COUNTS),
)
ROWS = st.builds(PooledText, st.binary(max_size=16), COUNTS, st.booleans())
POOLED = st.builds(Pooled, st.lists(ROWS, max_size=4).map(tuple), WORDS)


def payload(frame: bytes | None) -> bytes:
    assert frame is not None
    (found,) = FrameReader(2**24).feed(frame)
    return found


@given(NUMBERS, REQUESTS)
def test_a_request_arrives_as_it_was_sent(number: int, request: PoolingRequest) -> None:
    sent = payload(encode_call(number, request))
    assert is_of_call(sent)
    assert decode_call(sent) == (number, request)


@given(NUMBERS, COUNTS, POOLED)
def test_an_answer_arrives_as_it_was_sent(number: int, num_calls: int, pooled: Pooled) -> None:
    sent = payload(encode_answer(number, CallAnswer(num_calls, pooled)))
    assert is_of_call(sent)
    assert decode_answer(sent) == (number, CallAnswer(num_calls, pooled))


@for_each(
    RaystreamError("broken"),
    InvalidRequestError("no", "input"),
    ContextLengthExceededError("long", "input[3]"),
    PoolingFailedError("failed"),
    OverloadedError("full", None, 7, OverloadReason.TOKENS),
)
def test_an_error_arrives_as_it_was_raised(error: RaystreamError) -> None:
    failed = decode_answer(payload(encode_answer(3, CallAnswer(1, error))))
    assert failed is not None
    refusal = Refused(error, "a", is_full=True)  # type: ignore[arg-type] # whatever it is
    refused = decode_answer(payload(encode_answer(3, CallAnswer(1, refusal))))
    assert refused is not None
    assert isinstance(refused[1].outcome, Refused)
    assert (refused[1].outcome.replica_id, refused[1].outcome.is_full) == ("a", True)
    for found in (failed[1].outcome, refused[1].outcome.error):
        assert isinstance(found, RaystreamError)
        assert (type(found), found.args) == (type(error), error.args)
        assert overload_reason(found) is overload_reason(error)


def test_a_replica_whose_model_has_no_turn_says_so() -> None:
    asleep = CallAnswer(2, Asleep("a"))
    assert decode_answer(payload(encode_answer(3, asleep))) == (3, asleep)


def test_an_error_that_the_ingress_does_not_know_is_a_general_one() -> None:
    class NewError(RaystreamError):
        pass

    found = decode_answer(payload(encode_answer(3, CallAnswer(0, NewError("new")))))
    assert found is not None
    assert type(found[1].outcome) is RaystreamError
    assert str(found[1].outcome) == "new"


def test_departure_and_goodbye_are_told_apart_from_requests_and_answers() -> None:
    assert decode_call(payload(encode_departure(7))) == (7, None)
    assert decode_answer(payload(GOODBYE)) is None
    for other in (encode_message(()), encode_go_ahead(7)):
        assert not is_of_call(payload(other))
    assert not is_of_call(b"")


def test_a_request_that_is_too_large_for_a_channel_has_no_frame() -> None:
    largest = PoolingRequest("r", ("x" * (MAX_CALL_BYTES - 200),))
    assert encode_call(1, largest) is not None
    assert encode_call(1, PoolingRequest("r", ("x" * MAX_CALL_BYTES,))) is None
    assert encode_call(1, PoolingRequest("r", ("x",) * MAX_NUM_TEXTS)) is not None
    assert encode_call(1, PoolingRequest("r", ("x",) * (MAX_NUM_TEXTS + 1))) is None


@for_each(
    None,
    [],
    {},
    {"a": "b"},
    {1: []},
    {1: "request"},
    {1: ["r", [[1, "a"]], False, None, None, 0, "classify", 0.0, [], None]},
    {1: ["r", [{}], False, None, None, 0, "classify", 0.0, [], None]},
)
def test_what_is_no_call_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        decode_call(payload(encode_frame(value)))


@for_each({1: []}, {1: [0]}, {1: [0, "a", [[]]]}, {1: [0, []]}, {1: 2}, {"a": [0, ["Error", []]]})
def test_what_is_no_answer_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        decode_answer(payload(encode_frame(value)))


def test_scores_keep_every_bit() -> None:
    row = PooledText(b"\x00\x00\x80\x7f\x01\x02\x03\x04", 2)
    found = decode_answer(payload(encode_answer(0, CallAnswer(0, Pooled((row,))))))
    assert found is not None
    assert isinstance(found[1].outcome, Pooled)
    assert math.isinf(found[1].outcome.texts[0].scores[0])
    assert found[1].outcome.texts[0].row == row.row
