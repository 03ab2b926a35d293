"""Names that are not in the corpus, to train and to evaluate refusals."""

import random
import string
import zlib
from collections.abc import Collection, Iterator
from enum import StrEnum
from typing import Final

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r "
    "s sc sh sk sl sn sp st t th tr v w x z"
)
_NUCLEI = "a e i o u ai ea ee ie oa oo ou y"
_CODAS = "b ck d f ft g l ld lt m mp n nd ng nk nt p r rd rk rm rn rt s sh sk sp ss st t th x z"


class Kind(StrEnum):
    """How a made-up name was made."""

    FOREIGN_ATTRIBUTE = "real module, attribute of another"
    INVENTED_ATTRIBUTE = "real module, invented attribute"
    INVENTED_MODULE = "invented module, real attribute"
    INVENTED = "all invented"
    TYPO = "real name with a typo"


_KINDS_DRAWN: Final = (*Kind, Kind.TYPO, Kind.FOREIGN_ATTRIBUTE)
"""The two kinds that look most like real names are drawn twice as often."""


def is_held_out(name: str) -> bool:
    """Return whether a made-up name is kept for the evaluation: one in ten is, by its checksum."""
    return zlib.crc32(name.encode()) % 10 == 0


class MadeUpNames:
    """Makes names that look like the standard library's but are not in the corpus."""

    def __init__(self, real_names: Collection[str]) -> None:
        """Take words and forms from the real names, in any order."""
        self._real_names = tuple(sorted(real_names))
        self._forbidden = frozenset(real_names)
        dotted = [name.rsplit(".", 1) for name in self._real_names if "." in name]
        self._modules = tuple(sorted({parts[0] for parts in dotted}))
        self._attributes = tuple(sorted({parts[1] for parts in dotted}))
        self._words = tuple(sorted({word for name in self._real_names for word in _words_of(name)}))

    def draw(self, rng: random.Random, *, held_out: bool = False) -> tuple[Kind, str]:
        """Return a made-up name and its kind, either for training or held out."""
        while True:
            kind = rng.choice(_KINDS_DRAWN)
            name = self._draw_kind(kind, rng)
            if name not in self._forbidden and is_held_out(name) == held_out:
                return kind, name

    def for_training(self, rng: random.Random) -> Iterator[str]:
        """Yield names that are not held out, without end; names may repeat."""
        while True:
            yield self.draw(rng)[1]

    def for_evaluation(self, count: int, seed: int) -> tuple[tuple[Kind, str], ...]:
        """Return `count` distinct names that training never sees."""
        rng = random.Random(seed)
        found: dict[str, Kind] = {}
        while len(found) < count:
            kind, name = self.draw(rng, held_out=True)
            found.setdefault(name, kind)
        return tuple((kind, name) for name, kind in found.items())

    def _draw_kind(self, kind: Kind, rng: random.Random) -> str:
        match kind:
            case Kind.FOREIGN_ATTRIBUTE:
                return f"{rng.choice(self._modules)}.{rng.choice(self._attributes)}"
            case Kind.INVENTED_ATTRIBUTE:
                return f"{rng.choice(self._modules)}.{self._identifier(rng)}"
            case Kind.INVENTED_MODULE:
                return f"{self._identifier(rng)}.{rng.choice(self._attributes)}"
            case Kind.INVENTED:
                return ".".join(self._identifier(rng) for _ in range(rng.choice((1, 1, 2, 2, 3))))
            case Kind.TYPO:
                return _with_typo(rng.choice(self._real_names), rng)

    def _identifier(self, rng: random.Random) -> str:
        parts = [self._part(rng) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        style = rng.randrange(4)
        if style == 0:
            return "".join(part.capitalize() for part in parts)
        name = ("_" if style == 1 else "").join(parts)
        return f"{name}{rng.randrange(100)}" if rng.random() < 0.08 else name

    def _part(self, rng: random.Random) -> str:
        return rng.choice(self._words) if rng.random() < 0.4 else _syllables(rng)


def _words_of(name: str) -> list[str]:
    spaced = "".join(f" {char}" if char.isupper() else char for char in name)
    words = spaced.replace(".", " ").replace("_", " ").lower().split()
    return [word for word in words if len(word) > 2 and word.isalpha()]


def _syllables(rng: random.Random) -> str:
    onsets, nuclei, codas = _ONSETS.split(), _NUCLEI.split(), _CODAS.split()
    count = rng.choice((1, 2, 2, 3))
    body = "".join(rng.choice(onsets) + rng.choice(nuclei) for _ in range(count))
    return body + (rng.choice(codas) if rng.random() < 0.6 else "")


def _with_typo(name: str, rng: random.Random) -> str:
    """Change one letter: swap it with the next, drop it, double it or replace it."""
    at = rng.choice([index for index, char in enumerate(name) if char not in "._"])
    head, char, tail = name[:at], name[at], name[at + 1 :]
    match rng.randrange(4):
        case 0 if tail and tail[0] not in "._":
            return head + tail[0] + char + tail[1:]
        case 1 if len(name) > 3:
            return head + tail
        case 2:
            return head + char + char + tail
        case _:
            return head + rng.choice(string.ascii_lowercase) + tail
