r"""Splits a text into spans of bounded length, where a reader would: after sentences, then words.

Offsets count Unicode code points, as Python's strings do. No span ends within a grapheme cluster,
what a reader takes for one character (`\r\n`, a letter with its accents, a flag, a family of
emoji), so one that is longer than the bound gets a span of its own. Time and memory are linear in
the text and in what the spans hold together, whatever that is.

Source: https://www.unicode.org/reports/tr29/ (grapheme clusters; sentences in a simpler form)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import regex  # type: ignore[import-untyped] # ships no types

# How good a place is to cut; 0 stands within a grapheme.
GRAPHEME, WORD, SENTENCE = 1, 2, 3

# `\X` alone counts back to the first flag at each flag: quadratic in a row of them.
_GRAPHEME: Final = regex.compile(r"\p{RI}{2}[\p{GCB=Extend}\p{GCB=ZWJ}\p{GCB=SpacingMark}]*+|\X")

_JOINS: Final = regex.compile(r"[^\p{GCB=Other}\p{GCB=Control}\p{GCB=LF}]")
"""What every cluster of several code points holds one of, and most texts hold none of."""

_SPACES: Final = regex.compile(r"\s++")

_SENTENCE: Final = regex.compile(
    r"""
    [\p{SB=STerm}--\p{ASCII}] \p{SB=Close}*+ \s*+       # that of Chinese needs no space behind it
    | \p{SB=STerm} \p{SB=Close}*+ \s++
    | \p{SB=ATerm} \p{SB=Close}*+ \s++ (?!\p{Lower})    # a full stop, but not that of "e.g. this"
    | \n [^\S\n]*+ \n \s*+                              # a blank line
    """,
    regex.VERBOSE | regex.VERSION1,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text: `text[start:end]`.

    Attributes:
        start: Code points before it.
        end: Code points up to its end; more than `start`.
    """

    start: int
    end: int


def split(text: str, max_chars: int, overlap: int = 0) -> Iterator[Span]:
    """Yield the spans of a text, from its beginning to its end; none of an empty text.

    A span ends behind the last sentence that fits, if it is half as long then as it may be; else
    behind the last word, else behind the last grapheme. White space goes with what stands before
    it, as far as it fits. Without overlap the spans join to the text exactly.

    A span is cut when it is asked for, so whoever has enough may stop.

    Args:
        text: What is split.
        max_chars: Most code points of a span, unless it is a single longer grapheme; at least 1.
        overlap: Most code points at the end of a span which the next one repeats, less than
            `max_chars`. It repeats whole words, if there is one; else whole graphemes; and none if
            nothing new would fit beside them.
    """
    assert 0 <= overlap < max_chars, "the request's schema sees to it"
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
    """Return how good it is to cut before each code point, and behind the last."""
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
    """Note that it is so good to cut before, within and behind some white space."""
    places[first : last + 1] = bytes([kind]) * (last + 1 - first)


def _cut(places: bytearray, start: int, done: int, max_chars: int) -> int | None:
    """Return the best end of a span that brings something behind `done`; None if nothing fits."""
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
    """Return where what is repeated before `end` begins: at a word, else a grapheme, else there."""
    words = (p for p in range(first, end) if places[p] >= WORD and not text[p].isspace())
    graphemes = (p for p in range(first, end) if places[p])
    return next(words, None) or next(graphemes, end)
