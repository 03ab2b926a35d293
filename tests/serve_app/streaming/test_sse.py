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


def decode_in_pieces(encoded: bytes, cuts: list[int]) -> list[str]:
    decoder = SseDecoder()
    ends = sorted(cut % (len(encoded) + 1) for cut in cuts)
    starts = [0, *ends]
    pieces = [encoded[a:b] for a, b in zip(starts, [*ends, len(encoded)], strict=True)]
    return [event for piece in pieces for event in decoder.feed(piece)]


@given(st.lists(TEXT | st.sampled_from(AWKWARD)), st.lists(st.integers(min_value=0), max_size=5))
def test_any_text_comes_back_except_for_its_kind_of_line_end(
    texts: list[str], cuts: list[int]
) -> None:
    encoded = b"".join(encode_event(text) for text in texts)
    expected = [re.sub(r"\r\n|\r", "\n", text) for text in texts]
    assert decode_in_pieces(encoded, cuts) == expected


@given(TEXT | st.sampled_from(AWKWARD), st.lists(st.integers(min_value=0), max_size=5))
def test_text_in_json_comes_back_unchanged(text: str, cuts: list[int]) -> None:
    [event] = decode_in_pieces(encode_json({"text": text}), cuts)
    assert json.loads(event) == {"text": text}


@given(TEXT | st.sampled_from(AWKWARD))
def test_a_json_event_is_one_line_and_an_empty_one_by_anybodys_line_ends(text: str) -> None:
    encoded = encode_json({"text": text}).decode()
    assert encoded.splitlines() == [encoded.removesuffix("\n\n"), ""]


@given(TEXT | st.sampled_from(AWKWARD))
def test_a_comment_is_never_an_event(text: str) -> None:
    decoder = SseDecoder()
    assert decoder.feed(encode_comment(text) + encode_event("next")) == ["next"]


def test_the_constants_are_what_clients_look_for() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert PING == b": ping\n"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_becomes_null(number: float) -> None:
    assert encode_json({"rate": number}) == b'data: {"rate":null}\n\n'
