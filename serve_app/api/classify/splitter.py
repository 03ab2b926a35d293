r"""Splits a text into spans of bounded length: after sentences where possible, else after words.

Offsets count Unicode code points, as Python's strings do. No span ends within a grapheme cluster,
which a reader sees as one character (`\r\n`, a letter with its accents, a flag, a family of emoji);
a cluster longer than the bound gets a span of its own. Time and memory are linear in the length of
the text and in the total length of its spans, for any text.

Source: https://www.unicode.org/reports/tr29/ (grapheme clusters; sentences in a simpler form)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import regex  # type: ignore[import-untyped] # ships no types

# The quality of a place to cut; 0 is within a grapheme.
GRAPHEME, WORD, SENTENCE = 1, 2, 3

# Without the first branch, `\X` goes back over all flags before each flag, in quadratic time.
_GRAPHEME: Final = regex.compile(r"\p{RI}{2}[\p{GCB=Extend}\p{GCB=ZWJ}\p{GCB=SpacingMark}]*+|\X")

_JOINS: Final = regex.compile(r"[^\p{GCB=Other}\p{GCB=Control}\p{GCB=LF}]")
"""Every cluster of several code points holds one of these; most texts hold none."""

_SPACES: Final = regex.compile(r"\s++")

_SENTENCE: Final = regex.compile(
    r"""
    [\p{SB=STerm}--\p{ASCII}] \p{SB=Close}*+ \s*+       # Chinese needs no space after it
    | \p{SB=STerm} \p{SB=Close}*+ \s++
    | \p{SB=ATerm} \p{SB=Close}*+ \s++ (?!\p{Lower})    # a full stop, but not in "e.g. this"
    | \n [^\S\n]*+ \n \s*+                              # a blank line
    """,
    regex.VERBOSE | regex.VERSION1,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text: `text[start:end]`.

    Attributes:
        start: Code points before the span.
        end: Code points up to the span's end; more than `start`.
    """

    start: int
    end: int


def split(text: str, max_chars: int, overlap: int = 0) -> Iterator[Span]:
    """Yield the spans of a text in order; none for an empty text.

    A span ends after the last sentence that fits, if that makes it at least half as long as it may
    be; else after the last word, else after the last grapheme. White space belongs to the text
    before it, as far as it fits. Without overlap, the spans joined are exactly the text.

    Spans are cut lazily, so the caller may stop early.

    Args:
        text: The text to split.
        max_chars: Most code points of a span, unless it is a single longer grapheme; at least 1.
        overlap: Most code points of a span's end that the next span repeats, less than `max_chars`.
            Whole words are repeated if there are any, else whole graphemes; nothing is repeated if
            no new text would fit after it.
    """
    assert 0 <= overlap < max_chars, "the request's schema checks this"
    places = _places(text)
    start, end = 0, 0
    while end < len(text):
        cut = _cut(places, start, end, max_chars)
        if cut is None:
            start = end
            cut = _cut(places, start, end, max_chars) or _next_grapheme(places, end)
        yield Span(start, cut)
        start, end = _repeated_from(text, places, max(start + 1, cut - overlap), cut), cut


def _places(text: str) -> bytearray:
    """Return the quality of a cut before each code point, and after the last."""
    places = bytearray([GRAPHEME]) * (len(text) + 1)
    for spaces in _SPACES.finditer(text):
        _mark(places, WORD, spaces.start(), spaces.end())
    for sentence in _SENTENCE.finditer(text):
        num_spaces = len(sentence.group()) - len(sentence.group().rstrip())
        _mark(places, SENTENCE, sentence.end() - num_spaces, sentence.end())
    places[len(text)] = SENTENCE
    if _JOINS.search(text) is not None:
        for cluster in _GRAPHEME.finditer(text):
            start, end = cluster.span()
            if end - start > 1:
                places[start + 1 : end] = bytes(end - start - 1)
    return places


def _mark(places: bytearray, kind: int, first: int, last: int) -> None:
    """Give the places before, within and after a run of white space this quality."""
    places[first : last + 1] = bytes([kind]) * (last + 1 - first)


def _cut(places: bytearray, start: int, done: int, max_chars: int) -> int | None:
    """Return the best end of a span that reaches past `done`; None if nothing fits."""
    behind = start + max_chars + 1
    half = max(done, start + max_chars // 2)
    return (
        _last(places, SENTENCE, half + 1, behind)
        or _last(places, WORD, done + 1, behind)
        or _last(places, GRAPHEME, done + 1, behind)
    )


def _last(places: bytearray, worst: int, first: int, behind: int) -> int | None:
    found = max(places.rfind(kind, first, behind) for kind in range(worst, SENTENCE + 1))
    return None if found < 0 else found


def _next_grapheme(places: bytearray, start: int) -> int:
    return next(place for place in range(start + 1, len(places)) if places[place])


def _repeated_from(text: str, places: bytearray, first: int, end: int) -> int:
    """Return where the repeated text begins: at a word, else at a grapheme, else at `end`."""
    words = (p for p in range(first, end) if places[p] >= WORD and not text[p].isspace())
    graphemes = (p for p in range(first, end) if places[p])
    return next(words, None) or next(graphemes, end)
