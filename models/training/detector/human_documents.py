"""What people wrote: docstrings of Python's standard library, and the topics of its help.

Read from the Python that runs this, from its files, with nothing imported. A docstring that shares
its words with the corpus of pydoc-chat is left out whole, of a topic only such paragraphs. Code,
tables, headings and grammar are left out everywhere; what remains is prose.
"""

import ast
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from models.training.corpus import load_corpus
from models.training.detector.document import Document, Source

MIN_CHARS: Final = 40
SHINGLE_WORDS: Final = 8
_LEFT_OUT: Final = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
)
_NO_PROSE = re.compile(r">>>|::=|[-=*~^#+]{3}|^\s*\.\. |::$|^[\w.]+\(.*\)( ->.*)?$", re.MULTILINE)
_WORD = re.compile(r"[a-z0-9_]+")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class SeenText:
    """Knows the words that pydoc-chat was trained on."""

    def __init__(self) -> None:
        """Read the corpus."""
        answers = [words_of(entry.answer) for entry in load_corpus()]
        self._shingles = {shingle for answer in answers for shingle in shingles(answer)}
        self._short = {answer for answer in answers if len(answer) < SHINGLE_WORDS}

    def touches(self, paragraph: str) -> bool:
        """Tell whether a paragraph shares eight words in a row, or begins with a short answer."""
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
    """Return every topic and docstring with enough prose, each paragraph once."""
    seen = SeenText()
    return tuple(_without_repeats([*_topics(seen), *_docstrings(seen)]))


def _without_repeats(documents: list[Document]) -> Iterator[Document]:
    """Leave out what held-out documents share with the others, and every second time.

    What stands on both sides is taken from the side that is trained on, so that no eight words in a
    row lie on both.
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
    """Yield the prose of every docstring in a folder of Python files, tests aside."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts):
            origin = f"module {parts[0].removesuffix('.py')}"
            for docstring in _docstrings_of(path):
                if text := "\n\n".join(prose(docstring)):
                    yield Document(text, Source.DOCSTRING, origin)


def _docstrings_of(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files have invalid escapes; they are not ours
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 keeps files that no Python 3 reads
            return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs that are prose: not indented as code, no doctest, heading or table."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = paragraph.splitlines()
        is_code = all(line.startswith("   ") for line in lines)
        if not is_code and not _NO_PROSE.search(paragraph):
            yield "\n".join(line.strip() for line in lines if line.strip())


def main() -> None:
    """Print how much there is."""
    documents = human_documents()
    for source in (Source.TOPIC, Source.DOCSTRING):
        for is_held_out in (False, True):
            texts = [
                d.text for d in documents if (d.source, d.is_held_out) == (source, is_held_out)
            ]
            side = "held out" if is_held_out else "to train on"
            sys.stdout.write(f"{source}, {side}: {len(texts)}, {sum(map(len, texts))} characters\n")


if __name__ == "__main__":
    main()
