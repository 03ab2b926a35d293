"""BM25: how well shared words by themselves find an entry. This baseline learns nothing."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD = re.compile(r"[a-z0-9]+")
_ENDINGS: Final = ("ing", "ed", "es", "s")
_MIN_STEM: Final = 3


def terms(text: str) -> list[str]:
    """Return the lower-case words of a text without their endings; CamelCase is several words."""
    return [_stem(word) for word in _WORD.findall(_HUMP.sub(" ", text).lower())]


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _MIN_STEM:
            return word.removesuffix(ending)
    return word


class Bm25:
    """Ranks texts by the terms that they share with a question.

    Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009),
    with the usual k1 = 1.2 and b = 0.75.
    """

    K1: Final = 1.2
    B: Final = 0.75

    def __init__(self, texts: Sequence[str]) -> None:
        documents = [terms(text) for text in texts]
        self._lengths = [len(document) for document in documents]
        self._mean_length = sum(self._lengths) / len(documents)
        self._postings: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, document in enumerate(documents):
            for term, count in Counter(document).items():
                self._postings[term].append((index, count))

    def best(self, question: str, count: int) -> list[int]:
        """Return the indices of the best texts, best first; equal scores keep the texts' order."""
        scores: defaultdict[int, float] = defaultdict(float)
        for term in sorted(set(terms(question))):
            postings = self._postings.get(term, ())
            rarity = math.log(
                1 + (len(self._lengths) - len(postings) + 0.5) / (len(postings) + 0.5)
            )
            for index, times in postings:
                norm = 1 - self.B + self.B * self._lengths[index] / self._mean_length
                scores[index] += rarity * times * (self.K1 + 1) / (times + self.K1 * norm)
        return sorted(scores, key=lambda index: (-scores[index], index))[:count]
