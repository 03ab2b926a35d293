"""People's texts that are trained on and never examined on.

The corpus of pydoc-chat, where it is not held out: the very words that the chat model plays with,
as people put them, so that the words alone tell less. And docstrings of a few installed packages,
not too many of each, so that people's are not one library's style.
"""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Source, is_held_out
from models.training.detector.human_documents import docstrings_under, shingles, words_of

PACKAGES: Final = ("aiohttp", "click", "jinja2", "numpy", "pydantic", "rich", "werkzeug")
"""Apache-2.0: aiohttp; MIT: pydantic, rich; BSD-3-Clause: the others."""
MAX_PER_PACKAGE: Final = 500
SEED: Final = 31


def extra_documents(held_out: Sequence[Document]) -> tuple[Document, ...]:
    """Return the corpus and the packages' docstrings, but for what shares words with `held_out`."""
    known = {it for document in held_out for it in shingles(words_of(document.text))}
    found = [*corpus_documents(held_out=False), *_package_documents()]
    return tuple(it for it in found if known.isdisjoint(shingles(words_of(it.text))))


def corpus_documents(*, held_out: bool) -> Iterator[Document]:
    """Yield the answers of one side, on which all that is sampled about their names lies too."""
    for answer in dict.fromkeys(entry.answer for entry in load_corpus()):
        origin = f"answer {answer}"
        if is_held_out(origin) is held_out:
            yield Document(answer, Source.DOCSTRING, origin)


def package_documents(package: str) -> list[Document]:
    """Return the docstrings of an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return list(docstrings_under(Path(spec.origin).parent))


def _package_documents() -> Iterator[Document]:
    rng = random.Random(SEED)
    for package in PACKAGES:
        documents = package_documents(package)
        yield from rng.sample(documents, min(len(documents), MAX_PER_PACKAGE))
