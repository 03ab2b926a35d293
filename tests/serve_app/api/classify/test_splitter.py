"""For any text, spans lose nothing, repeat nothing but the overlap, and cut no grapheme."""

from itertools import pairwise

import regex  # type: ignore[import-untyped] # ships no types
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.classify.splitter import Span, split
from tests.offenders import for_each

FLAG, OTHER_FLAG = "\U0001f1e9\U0001f1ea", "\U0001f1eb\U0001f1f7"
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
THUMB = "\U0001f44d\U0001f3fd"
ACCENTED = "e\u0301\u0323"
CONJUNCT = "\u0915\u094d\u0937\u093f"
SYLLABLE = "\u1112\u1161\u11ab"

# Each of these exercises other rules; texts combine several.
BITS = [
    "a", "B", "word", " ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", ".", "!", "?", ". ", "? B",
    "\u3002", "\u300d", '."', ".)", "e.g. ", "\u00a0", "\u2028", "\u200b", "\ufeff", "\u0000",
    "\u0301", "\u200d", "\ufe0f", "\u0600", "\U0001f1e9", FLAG, OTHER_FLAG, FAMILY, THUMB,
    ACCENTED, CONJUNCT, SYLLABLE,
    "\u65e5\u672c", "\U0001f600", "\u0e33", "\ud7a3",
]  # fmt: skip
WORDLESS = st.lists(st.sampled_from([FLAG, FAMILY, THUMB, ACCENTED, CONJUNCT, "a", "\u0301"])).map(
    "".join
)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
MIXED = st.lists(st.one_of(st.sampled_from(BITS), UNICODE), max_size=40).map("".join)
TEXTS = st.one_of(MIXED, st.lists(st.sampled_from(BITS), max_size=80).map("".join))


def pieces(text: str, max_chars: int, overlap: int = 0) -> list[str]:
    return [text[span.start : span.end] for span in split(text, max_chars, overlap)]


def grapheme_ends(text: str) -> set[int]:
    return {0, *(match.end() for match in regex.finditer(r"\X", text))}


@given(TEXTS, st.integers(1, 40))
def test_pieces_join_to_the_text(text: str, max_chars: int) -> None:
    spans = list(split(text, max_chars))
    assert "".join(text[span.start : span.end] for span in spans) == text
    assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
    assert all(span.start < span.end for span in spans)


@given(TEXTS, st.integers(1, 40), st.data())
def test_no_grapheme_is_cut_and_only_a_single_grapheme_exceeds_the_bound(
    text: str, max_chars: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, max_chars - 1))
    ends = grapheme_ends(text)
    for span in split(text, max_chars, overlap):
        assert {span.start, span.end} <= ends
        if span.end - span.start > max_chars:
            assert not ends & set(range(span.start + 1, span.end))


@given(TEXTS, st.integers(2, 40), st.data())
def test_overlapping_pieces_advance_and_leave_nothing_out(
    text: str, max_chars: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(1, max_chars - 1))
    spans = list(split(text, max_chars, overlap))
    assert [spans[0].start, spans[-1].end] == [0, len(text)] if text else not spans
    for one, other in pairwise(spans):
        assert one.start < other.start <= one.end < other.end
        assert one.end - other.start <= overlap


@given(WORDLESS, st.integers(1, 40))
def test_without_words_and_sentences_pieces_are_full(text: str, max_chars: int) -> None:
    for span in list(split(text, max_chars))[:-1]:
        following = min(end for end in grapheme_ends(text) if end > span.end)
        assert following - span.start > max_chars


@for_each(
    ("One is. Two is. Three is.", 16, ["One is. Two is. ", "Three is."]),
    ("One is. Two is. Three is.", 15, ["One is. Two is.", " Three is."]),
    ("One is! Two is? Three", 12, ["One is! ", "Two is? ", "Three"]),
    ("He said (so.) And left", 18, ["He said (so.) ", "And left"]),
    ("See e.g. this one here", 16, ["See e.g. this ", "one here"]),
    ("A title\n\nand a text that goes on", 14, ["A title\n\n", "and a text ", "that goes on"]),
    ("\u3053\u3046\u3002\u305d\u3046\u3067\u3059\u3002", 5,
     ["\u3053\u3046\u3002", "\u305d\u3046\u3067\u3059\u3002"]),
    ("No. A word that is longer", 14, ["No. A word ", "that is longer"]),
    ("words and words", 7, ["words ", "and ", "words"]),
    ("words and words", 5, ["words", " and ", "words"]),
    ("antidisestablishment", 8, ["antidise", "stablish", "ment"]),
    ("a" + " " * 6 + "b", 4, ["a   ", "   b"]),
    ("ab\r\ncd", 3, ["ab", "\r\n", "cd"]),
    (FLAG + OTHER_FLAG + FLAG, 5, [FLAG + OTHER_FLAG, FLAG]),
    ("x" + FAMILY + "y", 3, ["x", FAMILY, "y"]),
    (ACCENTED * 3, 7, [ACCENTED * 2, ACCENTED]),
    (CONJUNCT * 2, 5, [CONJUNCT, CONJUNCT]),
    ("", 5, []),
    ("short", 5, ["short"]),
)  # fmt: skip
def test_pieces_end_after_sentences_or_words(
    text: str, max_chars: int, expected: list[str]
) -> None:
    assert pieces(text, max_chars) == expected


@for_each(
    ("one two three four", 10, 6, ["one two ", "two three ", "three four"]),
    ("abcdefgh", 4, 2, ["abcd", "cdef", "efgh"]),
    ("abcdefgh", 4, 3, ["abcd", "bcde", "cdef", "defg", "efgh"]),
    ("ab" + FAMILY, 4, 2, ["ab", FAMILY]),
    (FLAG * 3, 4, 3, [FLAG * 2, FLAG * 2]),
)
def test_overlapping_pieces_begin_with_a_word_if_there_is_one(
    text: str, max_chars: int, overlap: int, expected: list[str]
) -> None:
    assert pieces(text, max_chars, overlap) == expected


def test_offsets_count_code_points() -> None:
    assert list(split(f"{FLAG} {FLAG} {FLAG}", 4)) == [Span(0, 3), Span(3, 6), Span(6, 8)]


def test_a_caller_may_stop_early() -> None:
    spans = split("a" * 1_000_000, 1)
    assert [next(spans), next(spans)] == [Span(0, 1), Span(1, 2)]


# Any step of quadratic time would take minutes with these.
@for_each(
    "a", " ", ".", "\n", "\r\n", "\u0301", "\U0001f1e9", "\U0001f469\u200d", ".)))",
    "\u094d\u0915", "\u1100", "\u0600", "\u3002\u300d", "\n   ",
)  # fmt: skip
def test_a_megabyte_of_any_text_is_split(bit: str) -> None:
    text = (bit * (250_000 // len(bit) + 1))[:250_000]
    assert "".join(pieces(text, 300)) == text
    assert sum(map(len, pieces(text, 300, 200))) >= len(text)
