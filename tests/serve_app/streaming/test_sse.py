import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.streaming.sse import DONE, PING, encode_comment, encode_event, encode_json
from tests.serve_app.sse_decoder import SseDecoder

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
AWKWARD = ["", " ", "\n", "\r\n", "\r", "a\n\nb", " a", "data: x", ":", "🙂 你好\n"]
AWKWARD += ["\u2028\ufeff", "\x85", "\u2029", "\x0b\x0c\x1c\x1d\x1e", "Â\x85â"]


def decode_in_pieces(decoder: SseDecoder, encoded: bytes, cuts: list[int]) -> list[str]:
    ends = sorted(cut % (len(encoded) + 1) for cut in cuts)
    starts = [0, *ends]
    pieces = [encoded[a:b] for a, b in zip(starts, [*ends, len(encoded)], strict=True)]
    return [event for piece in pieces for event in decoder.feed(piece)]


@given(
    st.lists(st.tuples(st.booleans(), TEXT | st.sampled_from(AWKWARD))),
    st.lists(st.integers(min_value=0), max_size=5),
)
def test_any_event_and_comment_come_back_except_for_their_kind_of_line_end(
    sent: list[tuple[bool, str]], cuts: list[int]
) -> None:
    encoded = b"".join(
        encode_comment(text) if is_comment else encode_event(text) for is_comment, text in sent
    )
    texts = [(is_comment, re.sub(r"\r\n|\r", "\n", text)) for is_comment, text in sent]
    decoder = SseDecoder()
    events = decode_in_pieces(decoder, encoded, cuts)
    assert events == [text for is_comment, text in texts if not is_comment]
    assert decoder.comments == [
        line for is_comment, text in texts if is_comment for line in text.split("\n")
    ]


@given(TEXT | st.sampled_from(AWKWARD), st.lists(st.integers(min_value=0), max_size=5))
def test_text_in_json_comes_back_unchanged(text: str, cuts: list[int]) -> None:
    [event] = decode_in_pieces(SseDecoder(), encode_json({"text": text}), cuts)
    assert json.loads(event) == {"text": text}


@given(TEXT | st.sampled_from(AWKWARD))
def test_a_json_event_is_one_line_and_an_empty_one_by_anybodys_line_ends(text: str) -> None:
    encoded = encode_json({"text": text}).decode()
    assert encoded.splitlines() == [encoded.removesuffix("\n\n"), ""]


def test_the_constants_are_what_clients_look_for() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert PING == b": ping\n"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_becomes_null(number: float) -> None:
    assert encode_json({"rate": number}) == b'data: {"rate":null}\n\n'
