from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deployments.engine.detokenizing.detokenizer import INCOMPLETE, Detokenizer, decode_with
from tests.engine.tiny_models import byte_tokenizer

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
BYTE_LEVEL = byte_tokenizer()
FIRST_BYTE_ID = 44
BYTE_IDS = {
    BYTE_LEVEL.convert_ids_to_tokens(i): i for i in range(FIRST_BYTE_ID, FIRST_BYTE_ID + 256)
}


def byte_level(token_ids: Sequence[int]) -> str:
    text = BYTE_LEVEL.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a sentencepiece-like tokenizer: ids 0 to 255 are bytes, then a few pieces."""
    pieces = ["▁Hello", "▁world", "lo", "▁", "日", "本", "é", "!", "\n", "👍"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


BYTE_FALLBACK = byte_fallback_tokenizer()


def byte_fallback(token_ids: Sequence[int]) -> str:
    return BYTE_FALLBACK.decode(list(token_ids))


def feed_one_by_one(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """Feed ids one by one; return the texts until a stop string or the end."""
    found = []
    for token_id in token_ids:
        text, is_stopped = detokenizer.feed((token_id,))
        found.append(text)
        if is_stopped:
            return found
    return [*found, detokenizer.flush()[0]]


def encode(text: str) -> list[int]:
    # Text that spells a special token must stay text: the special token would be skipped.
    token_ids: list[int] = BYTE_LEVEL.encode(
        text, add_special_tokens=False, split_special_tokens=True
    )
    return token_ids


@given(st.lists(st.integers(0, 299), max_size=80))
@example([FIRST_BYTE_ID + 200] * 70)
def test_any_byte_level_stream_joined_equals_the_whole_decoded(token_ids: list[int]) -> None:
    assert "".join(feed_one_by_one(Detokenizer(byte_level), token_ids)) == byte_level(token_ids)


@given(st.lists(st.integers(0, 265), max_size=60))
def test_any_byte_fallback_stream_gives_the_same_text_however_it_arrives(
    token_ids: list[int],
) -> None:
    one_by_one = "".join(feed_one_by_one(Detokenizer(byte_fallback), token_ids))
    at_once = Detokenizer(byte_fallback)
    text, _ = at_once.feed(token_ids)
    assert text + at_once.flush()[0] == one_by_one
    if INCOMPLETE not in byte_fallback(token_ids):
        assert one_by_one == byte_fallback(token_ids)


@given(st.lists(st.one_of(TEXTS.map(lambda t: list(t.encode())), st.just([256, 257, 259]))))
def test_valid_text_from_byte_fallback_arrives_whole(parts: list[list[int]]) -> None:
    token_ids = [i for part in parts for i in part]
    assert "".join(feed_one_by_one(Detokenizer(byte_fallback), token_ids)) == byte_fallback(
        token_ids
    )


@given(TEXTS)
@example("<eos>")
@example("a\n\nb  c\t 👩‍👩‍👧 日本語 \r\n e\u0301 ")
def test_text_arrives_unchanged_and_only_in_whole_characters(text: str) -> None:
    found = feed_one_by_one(Detokenizer(byte_level), encode(text))
    assert "".join(found) == text
    if INCOMPLETE not in text:
        assert all(INCOMPLETE not in each for each in found)


@given(TEXTS, st.lists(st.text(alphabet="ab\n👍é", min_size=1, max_size=4), min_size=1, max_size=3))
@example("abab", ["bab", "ba"])
def test_a_stop_string_ends_the_text_at_its_first_occurrence(text: str, stop: list[str]) -> None:
    text += "".join(reversed(stop)) + "b"
    detokenizer = Detokenizer(byte_level, stop)
    found = "".join(feed_one_by_one(detokenizer, encode(text)))
    first_end = min(text.find(s) + len(s) for s in stop if s in text)
    ending = [s for s in stop if text[:first_end].endswith(s)]
    assert found in {text[: first_end - len(s)] for s in ending}
    assert detokenizer.stopped_by in ending
    assert text.startswith(found + detokenizer.stopped_by)


@given(TEXTS)
def test_text_that_only_begins_like_a_stop_string_is_released(text: str) -> None:
    stop = text + "\x00"
    assert "".join(feed_one_by_one(Detokenizer(byte_level, [stop]), encode(text))) == text


def test_of_several_stop_strings_in_one_token_the_first_to_begin_ends_the_text() -> None:
    assert Detokenizer(byte_fallback, ["lo", "e", "o"]).feed([256]) == ("H", True)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(byte_level, ["</end>"])
    assert detokenizer.feed(encode("text</en")) == ("text", False)
    assert detokenizer.stopped_by is None
    assert detokenizer.feed(encode("d>more")) == ("", True)


@given(TEXTS, st.integers(0, 60))
def test_a_resumed_detokenizer_continues_where_the_other_stopped(text: str, at: int) -> None:
    token_ids = encode(text)
    whole = feed_one_by_one(Detokenizer(byte_level, ["ab"]), token_ids)
    resumed = Detokenizer(byte_level, ["ab"])
    _, is_stopped = resumed.feed(token_ids[:at])
    if not is_stopped:
        at = min(at, len(token_ids))
        assert feed_one_by_one(resumed, token_ids[at:]) == whole[at:]


@pytest.mark.slow
@given(TEXTS, st.lists(st.text(alphabet="ab\n👍é", min_size=1, max_size=4), min_size=1, max_size=3))
@example("abab", ["bab", "ba"])
@example("aab", ["aabx", "ab"])
def test_a_stop_string_does_not_end_the_text_before_min_tokens(text: str, stop: list[str]) -> None:
    text += "".join(reversed(stop)) + "b"
    token_ids = encode(text)
    for min_tokens in range(len(token_ids) + 1):
        early = byte_level(token_ids[:min_tokens]).rstrip(INCOMPLETE)
        # A brute-force search for the ends of all stop strings that a later token completes.
        ends = [
            at + len(s)
            for s in stop
            for at in range(len(text))
            if text.startswith(s, at) and at + len(s) > len(early)
        ]
        found = "".join(feed_one_by_one(Detokenizer(byte_level, stop, min_tokens), token_ids))
        if INCOMPLETE in text:
            continue
        if not ends:
            assert found == text
        else:
            ending = [s for s in stop if text[: min(ends)].endswith(s)]
            assert found in {text[: min(ends) - len(s)] for s in ending}
            assert len(found) >= min(min(ends) - len(s) for s in ending)


def test_a_stop_string_that_began_too_early_but_ends_in_time_ends_the_text() -> None:
    token_ids = encode("one END two END three")
    for min_tokens, text in ((6, "one "), (7, "one END two "), (20, "one END two END three")):
        assert (
            "".join(feed_one_by_one(Detokenizer(byte_level, ["END"], min_tokens), token_ids))
            == text
        )


def test_special_tokens_are_shown_unless_skipped() -> None:
    tokenizer = byte_tokenizer()
    token_ids = [5, *tokenizer.encode("a"), 5]
    assert decode_with(tokenizer)(token_ids) == "a"
    assert decode_with(tokenizer, skip_special_tokens=False)(token_ids) == "<special3>a<special3>"


CALL = '{"name": "f", "arguments": {"a": "} \\" STOP ]", "b": [1]}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
MISTRAL = f"[TOOL_CALLS] [{CALL}, {CALL}]"
IN_CALLS: list[tuple[str, str, str, str | None]] = [
    ("<tool_call>", f"{HERMES}\nSTOP more", f"{HERMES}\n", "STOP"),
    ("<tool_call>", f"{HERMES}{HERMES}", f"{HERMES}{HERMES}", None),
    ("<tool_call>", f"STOP {HERMES}", "", "STOP"),
    ("<tool_call>", f"ST{HERMES}OP", f"ST{HERMES}OP", None),
    ("[TOOL_CALLS]", f"{MISTRAL}STOP", MISTRAL, "STOP"),
    ("", f" {CALL}; {CALL}", f" {CALL}; {CALL}", None),
    ("", f"Not {CALL}", f"Not {CALL[: CALL.index('STOP')]}", "STOP"),
]


@pytest.mark.parametrize(("mark", "text", "told", "stop"), IN_CALLS)
def test_stop_strings_apply_outside_calls_only(
    mark: str, text: str, told: str, stop: str | None
) -> None:
    detokenizer = Detokenizer(byte_level, ["STOP"], call_mark=mark)
    assert "".join(feed_one_by_one(detokenizer, encode(text))) == told
    assert detokenizer.stopped_by == stop
    at_once = Detokenizer(byte_level, ["STOP"], call_mark=mark)
    assert at_once.advance(encode(text), is_last=True) == (told, stop is not None)


def test_a_stop_string_that_is_a_call_s_mark_ends_the_text_before_it() -> None:
    detokenizer = Detokenizer(byte_level, ["<tool_call>"], call_mark="<tool_call>")
    assert "".join(feed_one_by_one(detokenizer, encode(f"a{HERMES}"))) == "a"
