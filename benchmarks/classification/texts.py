"""The texts to classify: cuts from Python's documentation, the same in every run."""

import random
from dataclasses import dataclass
from pydoc_data.topics import topics

MAX_PIECE_CHARS = 300
"""The longest piece of the hand-made queue batcher; see `benchmarks.baselines`."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The range of the texts' lengths in characters; all lengths are equally likely."""

    min_chars: int
    max_chars: int

    def __str__(self) -> str:
        """Return the range as the tables show it."""
        return f"{self.min_chars}-{self.max_chars}"


SHORT = Lengths(100, 300)
MIXED = Lengths(100, 800)


def documentation() -> str:
    """Return the documentation of the language, as one text."""
    return "\n".join(topics[key] for key in sorted(topics))


def make_texts(lengths: Lengths, count: int, *, seed: int = 0) -> list[str]:
    """Return `count` texts, cut from the documentation at random places.

    Lengths are spread evenly and shuffled, so that a few texts have the same mean length as many,
    and measurements with few texts are comparable.
    """
    source, rng = documentation(), random.Random(seed)
    spread = lengths.max_chars - lengths.min_chars
    sizes = [lengths.min_chars + round(spread * (i + 0.5) / count) for i in range(count)]
    rng.shuffle(sizes)
    starts = [rng.randrange(len(source) - size) for size in sizes]
    return [source[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def split(text: str) -> list[str]:
    """Return a text's pieces, cut by characters as in the hand-made queue batcher."""
    return [text[i : i + MAX_PIECE_CHARS] for i in range(0, len(text), MAX_PIECE_CHARS)]
