"""The texts that are classified: cuts from Python's own documentation, the same in every run."""

import random
from dataclasses import dataclass
from pydoc_data.topics import topics

MAX_PIECE_CHARS = 300
"""The hand-made queue batcher's pieces are no longer; see `benchmarks.baselines`."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """From how many to how many characters texts have; no length is more likely than another."""

    min_chars: int
    max_chars: int

    def __str__(self) -> str:
        """Name them as the tables do."""
        return f"{self.min_chars}-{self.max_chars}"


SHORT = Lengths(100, 300)
MIXED = Lengths(100, 800)


def documentation() -> str:
    """Return the documentation of the language, as one text."""
    return "\n".join(topics[key] for key in sorted(topics))


def make_texts(lengths: Lengths, count: int, *, seed: int = 0) -> list[str]:
    """Return cuts from random places.

    Lengths are spread evenly and shuffled, so that few texts are as long on average as many are,
    and what was measured with few is comparable.
    """
    source, rng = documentation(), random.Random(seed)
    spread = lengths.max_chars - lengths.min_chars
    sizes = [lengths.min_chars + round(spread * (i + 0.5) / count) for i in range(count)]
    rng.shuffle(sizes)
    starts = [rng.randrange(len(source) - size) for size in sizes]
    return [source[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def split(text: str) -> list[str]:
    """Return a text's pieces, cut by characters, as the hand-made queue batcher's are."""
    return [text[i : i + MAX_PIECE_CHARS] for i in range(0, len(text), MAX_PIECE_CHARS)]
