import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.channel.wire import (
    MAX_INGRESS_BYTES,
    VERSION,
    FrameReader,
    Hello,
    WireError,
    decode_go_ahead,
    decode_hello,
    decode_message,
    encode_go_ahead,
    encode_hello,
    encode_message,
)
from deployments.contract.output import (
    FinishReason,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    TokenLogprobs,
)
from tests.offenders import for_each

TOKEN_IDS = st.integers(0, 2**31)
TEXTS = st.text(st.characters(codec=None), max_size=20)
LOGPROB = st.builds(
    TokenLogprob, TOKEN_IDS, st.binary(max_size=8), st.floats(max_value=0, allow_nan=False)
)
LOGPROBS = st.builds(TokenLogprobs, LOGPROB, st.lists(LOGPROB, max_size=3).map(tuple))
BYTES = st.binary(max_size=8)
PROMPT_LOGPROBS = st.builds(
    PromptLogprobs,
    st.none() | st.tuples(TOKEN_IDS, BYTES),
    st.integers(0, 20),
    BYTES,
    BYTES,
    BYTES,
    st.lists(st.tuples(TOKEN_IDS, BYTES), max_size=3).map(tuple),
)
DELTAS = st.builds(
    TextDelta,
    st.lists(TOKEN_IDS, max_size=4).map(tuple),
    TEXTS,
    st.none() | st.sampled_from(FinishReason),
    st.none() | TEXTS,
    st.lists(LOGPROBS, max_size=3).map(tuple),
    st.integers(0, 2**40),
    st.none() | TEXTS,
    prompt_logprobs=st.lists(PROMPT_LOGPROBS, max_size=2).map(tuple),
).filter(lambda delta: delta.finish_reason is not None or (delta.error, delta.stop) == (None, None))
MESSAGES = st.lists(st.tuples(st.integers(0, 2**63), DELTAS), max_size=5)


def payloads(data: bytes, max_bytes: int = 2**20) -> list[bytes]:
    return list(FrameReader(max_bytes).feed(data))


@given(MESSAGES)
def test_a_message_arrives_as_it_was_sent(entries: list[tuple[int, TextDelta]]) -> None:
    (payload,) = payloads(encode_message(entries))
    assert decode_message(payload) == entries


@given(st.lists(MESSAGES, max_size=4), st.data())
def test_frames_arrive_whole_wherever_reads_split_them(
    messages: list[list[tuple[int, TextDelta]]], data: st.DataObject
) -> None:
    sent = b"".join(map(encode_message, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    reader = FrameReader(2**20)
    found = [
        decode_message(payload)
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)
        for payload in reader.feed(sent[start:end])
    ]
    assert found == messages


@given(st.binary(min_size=16, max_size=16), st.text(string.hexdigits, min_size=32, max_size=32))
def test_a_hello_arrives_as_it_was_sent_and_fits(secret: bytes, channel_id: str) -> None:
    (payload,) = payloads(encode_hello(Hello(secret, channel_id)), MAX_INGRESS_BYTES)
    assert decode_hello(payload) == Hello(secret, channel_id)


def test_a_hello_does_not_print_the_secret() -> None:
    assert "SECRET" not in repr(Hello(b"SECRET", "me"))


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_understood_and_never_a_crash(garbage: bytes) -> None:
    for decode in (decode_hello, decode_go_ahead, decode_message):
        try:
            decode(garbage)
        except WireError:
            continue


@for_each(b"", b"\xc1", b"\xff" * 9, b"\x90", b"\x93\x01\x02\x03", b"\xd9\xff", b"\x81\x90\x90")
def test_a_payload_that_is_no_hello_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_hello(payload)


def test_a_hello_of_another_version_is_refused() -> None:
    (payload,) = payloads(encode_hello(Hello(b"s", "me")))
    assert payload[:2] == bytes([0x93, VERSION])
    with pytest.raises(WireError):
        decode_hello(payload[:1] + bytes([VERSION + 1]) + payload[2:])


@given(st.integers(0, 2**63))
def test_a_go_ahead_arrives_as_it_was_sent_and_is_no_hello(number: int) -> None:
    (payload,) = payloads(encode_go_ahead(number), MAX_INGRESS_BYTES)
    assert decode_go_ahead(payload) == number
    with pytest.raises(WireError):
        decode_hello(payload)


@for_each(b"\x90", b"\x92\x01\x02", b"\x91\xc0", b"\x01")
def test_a_payload_that_is_no_go_ahead_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_go_ahead(payload)


def test_a_frame_that_is_too_long_is_refused_by_its_first_bytes() -> None:
    with pytest.raises(WireError, match="257 bytes"):
        payloads((257).to_bytes(4), MAX_INGRESS_BYTES)
    assert payloads((256).to_bytes(4), MAX_INGRESS_BYTES) == []
