"""Pieces: what the detector is trained and evaluated on. Both authors' texts are treated alike.

A text is normalised as the tokenizer does it and cut at word ends into 20 to 300 characters; in
half of the documents at a nearby sentence end, if there is one. Only pieces of prose are kept. Both
authors get equally many pieces of each length band, so that length reveals nothing.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from models.training.corpus import load_corpus
from models.training.detector.architecture import normalised
from models.training.detector.document import Document, Label, Source

MIN_CHARS: Final = 20
MAX_CHARS: Final = 300
BANDS: Final = ((20, 49), (50, 99), (100, 199), (200, 300))
"""Ranges of a piece's number of characters, both ends included."""
MIN_PROSE_SHARE: Final = 0.75
_SENTENCE_END = re.compile(r"[.!?](?= )")


@dataclass(frozen=True, slots=True)
class Piece:
    """A normalised text of 20 to 300 characters.

    Attributes:
        is_recited: Whether pydoc-chat produced a text that its corpus holds word for word, so that
            a person wrote it.
    """

    text: str
    source: Source
    temperature: float | None
    is_recited: bool

    @property
    def label(self) -> Label:
        """The author."""
        return self.source.label

    @property
    def band(self) -> tuple[int, int]:
        """The length band."""
        return next(band for band in BANDS if band[0] <= len(self.text) <= band[1])


class Cutter:
    """Cuts documents; the same state of its generator gives the same pieces."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pieces(self, documents: Iterable[Document]) -> list[Piece]:
        """Cut every document from beginning to end; equal texts are kept once."""
        found: dict[str, Piece] = {}
        for document in documents:
            prefers_sentences = self._rng.random() < 0.5
            for text in self.cut(normalised(document.text), prefers_sentences=prefers_sentences):
                found.setdefault(text, self._piece(text, document))
        return [piece for text, piece in found.items() if is_prose(text)]

    def cut(self, text: str, *, prefers_sentences: bool) -> Iterator[str]:
        """Yield pieces of random lengths, in order; a remainder that is too short is left out."""
        at = 0
        while len(text) - at >= MIN_CHARS:
            end = cut_end(text, at, self._rng.randint(MIN_CHARS, MAX_CHARS), prefers_sentences)
            piece = text[at:end].strip()
            if len(piece) >= MIN_CHARS:
                yield piece
            at = end

    def _piece(self, text: str, document: Document) -> Piece:
        is_recited = document.source.label is Label.CHAT and text in _recitable()
        return Piece(text, document.source, document.temperature, is_recited)


@cache
def _recitable() -> str:
    """Return all answers of the corpus, normalised."""
    return "\n".join(normalised(entry.answer) for entry in load_corpus())


def cut_end(text: str, start: int, max_chars: int, prefers_sentences: bool) -> int:
    """Return the end of a piece of at most `max_chars` that begins at `start`."""
    end = start + max_chars
    if end >= len(text):
        return len(text)
    if prefers_sentences:
        sentences = [it.end() for it in _SENTENCE_END.finditer(text, start + max_chars // 2, end)]
        if sentences:
            return sentences[-1]
    word_end = text.rfind(" ", start + 1, end + 1)
    return word_end if word_end > start else end


def is_prose(text: str) -> bool:
    """Return whether three in four characters are letters or blanks, unlike in code and tables."""
    share = sum(char.isalpha() or char == " " for char in text) / len(text)
    return share >= MIN_PROSE_SHARE


def balanced(
    pieces: Sequence[Piece], rng: random.Random, *, all_lengths_alike: bool = False
) -> list[Piece]:
    """Sample equally many pieces of each author in each length band: as many as the rarer one has.

    With `all_lengths_alike` a band's share is its width, so that all lengths are about equally
    frequent.
    """
    by_class: dict[tuple[tuple[int, int], Label], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_class[piece.band, piece.label].append(piece)
    counts = {band: min(len(by_class[band, label]) for label in Label) for band in BANDS}
    if all_lengths_alike:
        per_char = min(count / _width(band) for band, count in counts.items())
        counts = {band: int(per_char * _width(band)) for band in BANDS}
    chosen = [
        piece
        for band in BANDS
        for label in Label
        for piece in rng.sample(by_class[band, label], counts[band])
    ]
    rng.shuffle(chosen)
    return chosen


def _width(band: tuple[int, int]) -> int:
    return band[1] - band[0] + 1


def write_pieces(pieces: Iterable[Piece], path: Path) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for piece in pieces:
            file.write(json.dumps(asdict(piece)) + "\n")


def read_pieces(path: Path) -> list[Piece]:
    """Read what `write_pieces` wrote."""
    with path.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [Piece(**{**fields, "source": Source(fields["source"])}) for fields in found]
