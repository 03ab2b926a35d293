"""Pieces: what the detector learns from and is examined on, both authors' cut and treated alike.

A text is normalised as the tokenizer does it, cut at word ends into 20 to 300 characters, in half
of the documents at sentence ends where one is near, and only pieces that are prose are kept. Both
authors get as many pieces of each length band, so that length alone tells nothing.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from models.training.corpus import load_corpus
from models.training.detector.architecture import normalised
from models.training.detector.document import Document, Label, Source

MIN_CHARS: Final = 20
MAX_CHARS: Final = 300
BANDS: Final = ((20, 49), (50, 99), (100, 199), (200, 300))
"""Characters of a piece, both ends included."""
MIN_PROSE_SHARE: Final = 0.75
_SENTENCE_END = re.compile(r"[.!?](?= )")


@dataclass(frozen=True, slots=True)
class Piece:
    """A normalised text of 20 to 300 characters.

    Attributes:
        is_recited: Whether pydoc-chat said it, but its corpus holds it word for word, so that a
            person wrote it.
    """

    text: str
    source: Source
    temperature: float | None
    is_recited: bool

    @property
    def label(self) -> Label:
        """Return the author."""
        return self.source.label

    @property
    def band(self) -> tuple[int, int]:
        """Return the length band."""
        return next(band for band in BANDS if band[0] <= len(self.text) <= band[1])


class Cutter:
    """Cuts documents; the same state of its generator gives the same pieces."""

    def __init__(self, rng: random.Random) -> None:
        """Take every draw from `rng`."""
        self._rng = rng
        self._recitable = "\n".join(normalised(entry.answer) for entry in load_corpus())

    def pieces(self, documents: Iterable[Document]) -> list[Piece]:
        """Cut every document from end to end; each text is kept once."""
        found: dict[str, Piece] = {}
        for document in documents:
            prefers_sentences = self._rng.random() < 0.5
            for text in self.cut(normalised(document.text), prefers_sentences=prefers_sentences):
                found.setdefault(text, self._piece(text, document))
        return [piece for text, piece in found.items() if is_prose(text)]

    def cut(self, text: str, *, prefers_sentences: bool) -> Iterator[str]:
        """Yield pieces of drawn lengths, in order; what is too short at the end is left out."""
        at = 0
        while len(text) - at >= MIN_CHARS:
            end = cut_end(text, at, self._rng.randint(MIN_CHARS, MAX_CHARS), prefers_sentences)
            piece = text[at:end].strip()
            if len(piece) >= MIN_CHARS:
                yield piece
            at = end

    def _piece(self, text: str, document: Document) -> Piece:
        is_recited = document.source.label is Label.CHAT and text in self._recitable
        return Piece(text, document.source, document.temperature, is_recited)


def cut_end(text: str, start: int, max_chars: int, prefers_sentences: bool) -> int:
    """Return where a piece of at most `max_chars` that begins at `start` ends."""
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
    """Tell whether three in four characters are letters and blanks; the rest is code or tables."""
    share = sum(char.isalpha() or char == " " for char in text) / len(text)
    return share >= MIN_PROSE_SHARE


def balanced(
    pieces: Sequence[Piece], rng: random.Random, *, all_lengths_alike: bool = False
) -> list[Piece]:
    """Draw as many pieces of each author in each length band, as many as the rarer one has.

    With `all_lengths_alike` a band's share is its width, so that each length comes about as often.
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
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for piece in pieces:
            file.write(json.dumps(asdict(piece)) + "\n")


def read_pieces(path: Path) -> list[Piece]:
    """Read what `write_pieces` wrote."""
    with path.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [Piece(**{**fields, "source": Source(fields["source"])}) for fields in found]
