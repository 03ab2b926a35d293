"""People's texts: docstrings of Python's standard library, and the topics of its help.

They are read from the files of the running Python; nothing is imported. A docstring that shares
words with pydoc-chat's corpus is left out whole; of a topic, only such paragraphs are. Code,
tables, headings and grammar are always left out, so that prose remains.

Extra documents are trained on and never evaluated. The training part of pydoc-chat's corpus shows
the chat model's words as people wrote them, so that words by themselves reveal less. Docstrings of
a few installed packages, a bounded number of each, keep people's texts from being one library's
style.
"""

import ast
import importlib.util
import inspect
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Source, is_held_out

MIN_CHARS: Final = 40
SHINGLE_WORDS: Final = 8
_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
)
_NO_PROSE = re.compile(r">>>|::=|[-=*~^#+]{3}|^\s*\.\. |::$|^[\w.]+\(.*\)( ->.*)?$", re.MULTILINE)
_WORD = re.compile(r"[a-z0-9_]+")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


PACKAGES: Final = ("aiohttp", "click", "jinja2", "numpy", "pydantic", "rich", "werkzeug")
"""Apache-2.0: aiohttp; MIT: pydantic, rich; BSD-3-Clause: the others."""
MAX_PER_PACKAGE: Final = 500
SEED: Final = 31


class SeenText:
    """Knows the words that pydoc-chat was trained on."""

    def __init__(self) -> None:
        answers = [words_of(entry.answer) for entry in load_corpus()]
        self._shingles = {shingle for answer in answers for shingle in shingles(answer)}
        self._short = {answer for answer in answers if len(answer) < SHINGLE_WORDS}

    def touches(self, paragraph: str) -> bool:
        """Return whether a paragraph shares eight words in a row or begins with a short answer."""
        words = words_of(paragraph)
        begins = any(words[:length] in self._short for length in range(1, SHINGLE_WORDS))
        return begins or not self._shingles.isdisjoint(shingles(words))


def words_of(text: str) -> tuple[str, ...]:
    """Return the lower-case words of a text."""
    return tuple(_WORD.findall(text.lower()))


def shingles(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Return every run of eight words."""
    return {words[at : at + SHINGLE_WORDS] for at in range(len(words) - SHINGLE_WORDS + 1)}


def human_documents() -> tuple[Document, ...]:
    """Return every topic and docstring with enough prose, without repeated paragraphs."""
    seen = SeenText()
    return tuple(_without_repeats([*_topics(seen), *_docstrings(seen)]))


def _without_repeats(documents: list[Document]) -> Iterator[Document]:
    """Drop paragraphs that share eight words in a row with an earlier one, and short repeated ones.

    Held-out documents come first, so shared text is dropped from the training side. A document with
    too little text left is dropped, too.
    """
    known: set[tuple[str, ...]] = set()
    for document in sorted(documents, key=lambda it: not it.is_held_out):
        kept: list[str] = []
        for paragraph in document.text.split("\n\n"):
            words = words_of(paragraph)
            keys = shingles(words) or {words}
            if known.isdisjoint(keys):
                known |= keys
                kept.append(paragraph)
        if sum(map(len, kept)) >= MIN_CHARS:
            yield Document("\n\n".join(kept), document.source, document.origin)


def _topics(seen: SeenText) -> Iterator[Document]:
    for name, text in sorted(topics.items()):
        kept = [it for it in prose(text) if not seen.touches(it)]
        yield Document("\n\n".join(kept), Source.TOPIC, f"topic {name}")


def _docstrings(seen: SeenText) -> Iterator[Document]:
    for document in docstrings_under(Path(sysconfig.get_paths()["stdlib"])):
        if not any(map(seen.touches, document.text.split("\n\n"))):
            yield document


def docstrings_under(root: Path) -> Iterator[Document]:
    """Yield the prose of every docstring in a folder of Python files, except tests."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts):
            origin = f"module {parts[0].removesuffix('.py')}"
            for docstring in _docstrings_of(path):
                if text := "\n\n".join(prose(docstring)):
                    yield Document(text, Source.DOCSTRING, origin)


def _docstrings_of(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old files of the standard library
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 has files that no Python 3 can parse
            return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose: no indented code, doctest, heading or table."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = paragraph.splitlines()
        is_code = all(line.startswith("   ") for line in lines)
        if not is_code and not _NO_PROSE.search(paragraph):
            yield "\n".join(line.strip() for line in lines if line.strip())


def extra_documents(held_out: Sequence[Document]) -> tuple[Document, ...]:
    """Return the corpus and the packages' docstrings that share no words with `held_out`."""
    known = {it for document in held_out for it in shingles(words_of(document.text))}
    found = [*corpus_documents(held_out=False), *_package_documents()]
    return tuple(it for it in found if known.isdisjoint(shingles(words_of(it.text))))


def corpus_documents(*, held_out: bool) -> Iterator[Document]:
    """Yield the corpus answers of one side; samples about their names are on the same side."""
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


def main() -> None:
    """Print the number and the size of people's texts."""
    documents = human_documents()
    for source in (Source.TOPIC, Source.DOCSTRING):
        for held_out in (False, True):
            texts = [d.text for d in documents if (d.source, d.is_held_out) == (source, held_out)]
            side = "held out" if held_out else "to train on"
            sys.stdout.write(f"{source}, {side}: {len(texts)}, {sum(map(len, texts))} characters\n")


if __name__ == "__main__":
    main()
