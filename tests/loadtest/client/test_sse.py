import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.sse import OversizedEventError, ServerSentEvent, SseDecoder

FIELD_NAMES = ["data", "event", "id", "retry", "", "datas", " data", "Data"]
VALUES = ["", " ", "  two", "[DONE]", '{"a": 1}', "你好 🙂", "\u2028", "\ufeff", "a:b", "12", "1x"]
LINES = st.one_of(
    st.builds(
        lambda name, colon, value: name + colon + value if colon else name,
        st.sampled_from(FIELD_NAMES),
        st.sampled_from([":", ": ", ""]),
        st.sampled_from(VALUES) | st.text(alphabet=st.characters(exclude_characters="\r\n")),
    ),
    st.just(""),
)
STREAMS = st.builds(
    lambda bom, lines: bom + "".join(line + end for line, end in lines),
    st.sampled_from(["", "\ufeff", "\ufeff\ufeff"]),
    st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r", "\r\n"])), max_size=20),
).map(lambda text: text.encode("utf-8", "replace"))


def plainly(stream: bytes) -> list[tuple[str, str]]:
    """Decode a whole stream as the standard describes: data and name of each event."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    *lines, _unfinished = re.split("\r\n|\r|\n", text)
    events, data, name = [], "", ""
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append((data[:-1], name or "message"))
            data, name = "", ""
        elif field == "data":
            data += value + "\n"
        elif field == "event":
            name = value
    return events


def fed(stream: bytes, cuts: list[int]) -> list[ServerSentEvent]:
    ends = sorted(cut % (len(stream) + 1) for cut in cuts)
    decoder = SseDecoder()
    pieces = [stream[a:b] for a, b in zip([0, *ends], [*ends, len(stream)], strict=True)]
    return [event for piece in pieces for event in decoder.feed(piece)]


@given(STREAMS, st.lists(st.integers(min_value=0), max_size=8))
def test_any_stream_in_any_pieces_is_decoded_as_the_standard_says(
    stream: bytes, cuts: list[int]
) -> None:
    assert fed(stream, cuts) == plainly(stream)


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0), max_size=8))
def test_any_bytes_decode_alike_whole_and_in_pieces(stream: bytes, cuts: list[int]) -> None:
    data = [event.data for event in fed(stream, cuts)]
    assert data == [event[0] for event in plainly(stream)]


@pytest.mark.parametrize("line_end", ["\n", "\r", "\r\n"])
def test_every_line_end_ends_lines_and_events(line_end: str) -> None:
    stream = line_end.join(["data: a", "data: b", "", "data: c", "", ""]).encode()
    assert [event.data for event in SseDecoder().feed(stream)] == ["a\nb", "c"]


def test_a_carriage_return_ends_an_event_before_its_newline_comes() -> None:
    decoder = SseDecoder()
    [event] = decoder.feed(b"data: a\r\n\r")
    assert event == ServerSentEvent("a")
    assert decoder.feed(b"\n") == []
    assert [event.data for event in decoder.feed(b"data: b\n\n")] == ["b"]


def test_a_byte_order_mark_is_skipped_only_at_the_start() -> None:
    stream = "\ufeffdata: a\n\n\ufeffdata: b\n\n".encode()
    assert [event.data for event in SseDecoder().feed(stream)] == ["a"]


def test_comments_are_not_events() -> None:
    assert SseDecoder().feed(b": ping\n\n:\n\n") == []


def test_the_standard_s_example_of_empty_data() -> None:
    stream = b"data\n\ndata\ndata\n\ndata:"
    assert [event.data for event in SseDecoder().feed(stream)] == ["", "\n"]


def test_a_name_holds_for_one_event() -> None:
    stream = b"id: 7\nevent: error\ndata: a\n\ndata: b\n\n"
    assert SseDecoder().feed(stream) == [("a", "error"), ("b", "message")]


def test_an_unfinished_last_event_is_dropped() -> None:
    assert [event.data for event in SseDecoder().feed(b"data: a\n\ndata: b\n")] == ["a"]


def test_an_event_without_end_is_refused() -> None:
    decoder = SseDecoder(max_event_bytes=100)
    decoder.feed(b"data: " + b"x" * 90)
    with pytest.raises(OversizedEventError, match="more than 100 bytes"):
        decoder.feed(b"x" * 90)


def test_many_small_events_are_not_an_oversized_one() -> None:
    decoder = SseDecoder(max_event_bytes=20)
    events = [event for _ in range(10) for event in decoder.feed(b"data: abc\n\n")]
    assert len(events) == 10
