"""What pydoc-search finds, what it is trained on, and which questions are held out.

``python -m models.training.search.entries SOURCES`` harvests all of it on Python 3.11 from the
reStructuredText sources of its documentation. Training and evaluation read only the committed
files.

An entry is a module, class, exception, function, method or property that the documentation
describes or that pydoc-chat knows. Its text is its kind, name, parameters and summary. The
summary is the first paragraph of its docstring or, if that has none, the first sentence of its
description.

One entry in eight is held out: training sees neither its text nor a sentence about it. Its
question is the first sentence of its description in the documentation, mostly in other words
than the docstring's. A sentence that repeats the docstring or spells the name is no question.
"""

import argparse
import importlib
import inspect
import json
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from models.training.corpus import answer_from, load_corpus
from models.training.detector.human_documents import shingles, words_of
from models.training.search.bm25 import terms
from models.training.search.documentation import Description, read_descriptions

MODEL_DIR: Final = Path(__file__).parents[2] / "pydoc-search"
DESCRIPTIONS_PATH: Final = Path(__file__).parent / "descriptions.jsonl"
MAX_PARAMETERS_CHARS: Final = 40
HELD_OUT_ONE_IN: Final = 8
MAX_SHARED: Final = 0.5
MIN_WORDS: Final = 4
_LEFT_OUT: Final = frozenset({"distutils", "idlelib", "lib2to3", "msilib", "test", "turtledemo"})
_ALIASES: Final = {"asyncio.loop.": "asyncio.AbstractEventLoop."}
"""Names in the documentation that are others in the code."""
_UNTOLD: Final = frozenset({"self", "cls", "args", "kwargs", "kwds", "kw"})
IMPERATIVES: Final = frozenset(
    """
    accept access acquire add append apply assert attempt bind block call cancel change check
    clear close combine compare compile compress compute connect construct convert copy create
    decode decompress delete determine disable disassemble display dump duplicate enable encode
    ensure enter execute exit extend extract fetch fill filter find flush force format generate
    get handle initialize insert join list load lock log look make mark modify move open parse
    perform play pop prepare prevent print process pull push put query raise read receive register
    release remove rename replace reset resolve restore retrieve return reverse round run save
    schedule search send set skip sort split start stop suspend take test transform translate
    truncate try turn undo unpack unregister update use wait wrap write yield
    """.split()  # noqa: SIM905 # a list of words is read more easily without quotes
)
"""Verbs with which a description may tell what the entry does."""
_COMMON_TERMS: Final = frozenset(
    """
    a an and are as at be by do for from how i if in is it its of on or that the this to what
    which with
    """.split()  # noqa: SIM905 # as above
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the index.

    Attributes:
        name: The qualified name; builtins' names have no module.
        text: What is embedded: kind, name, parameters and summary.
    """

    name: str
    text: str

    @property
    def heading(self) -> str:
        """Kind, name and parameters."""
        return self.text.partition(": ")[0]

    @property
    def summary(self) -> str:
        """What the entry does; may be empty."""
        return self.text.partition(": ")[2]

    @property
    def is_held_out(self) -> bool:
        """Whether training sees nothing of it; entries that share a summary share a side."""
        return zlib.crc32(self.summary.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the names of the entries that answer it, each of them well enough."""

    question: str
    names: tuple[str, ...]


def as_question(sentence: str) -> str:
    """Return a sentence as a person would ask for it, in the same words.

    "Return the base name." becomes "How do I return the base name?", "Returns the base name."
    becomes "What returns the base name?", and any other sentence a search without a full stop.
    """
    text = sentence.rstrip(".:")
    first, _, rest = text.partition(" ")
    verb = first.lower()
    if verb in IMPERATIVES:
        return f"How do I {verb} {rest}?"
    if verb.removesuffix("s") in IMPERATIVES or verb.removesuffix("es") in IMPERATIVES:
        return f"What {verb} {rest}?"
    return verb + text[len(first) :] if first.istitle() else text


def write_lines(path: Path, rows: Iterable[Entry | Description | Question]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def load_entries(path: Path = MODEL_DIR / "entries.jsonl") -> tuple[Entry, ...]:
    """Read the committed entries, sorted by name."""
    return tuple(Entry(**row) for row in _read_lines(path))


def load_descriptions(path: Path = DESCRIPTIONS_PATH) -> tuple[Description, ...]:
    """Read the committed sentences of the documentation."""
    return tuple(Description(**row) for row in _read_lines(path))


def load_questions(path: Path) -> tuple[Question, ...]:
    """Read held-out or hand-written questions."""
    return tuple(Question(row["question"], tuple(row["names"])) for row in _read_lines(path))


def harvest(
    descriptions: Sequence[Description],
) -> tuple[tuple[Entry, ...], tuple[Description, ...]]:
    """Collect the entries from the Python that runs this.

    Returns:
        The entries, sorted by name, and the sentences that describe one of them, with its name.
    """
    first = {it.name: it.text for it in reversed(descriptions) if it.place == 0}
    entries: dict[str, Entry] = {}
    names: dict[str, str] = {}
    for documented in dict.fromkeys([*(it.name for it in descriptions), *_names_of_pydoc_chat()]):
        for name in _names_in_code(documented):
            entry = _entry(name, first.get(documented, ""))
            if entry is not None:
                names[documented] = name
                entries.setdefault(name, entry)
                break
    kept = [
        Description(names[it.name], it.text, it.place) for it in descriptions if it.name in names
    ]
    return tuple(entries[name] for name in sorted(entries)), tuple(dict.fromkeys(kept))


def _names_of_pydoc_chat() -> Iterator[str]:
    return (entry.name for entry in load_corpus())


def _names_in_code(documented: str) -> Iterator[str]:
    for alias, real in _ALIASES.items():
        if documented.startswith(alias):
            yield real + documented.removeprefix(alias)
    yield documented
    # `.. method:: socket.recv` on the page of the module socket is socket.socket.recv.
    yield f"{documented.split('.')[0]}.{documented}"


def _entry(name: str, description: str) -> Entry | None:
    parts = name.split(".")
    if parts[0] in _LEFT_OUT or any(not part or part.startswith("_") for part in parts):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thing = _thing(parts)
        kind = _kind(thing, parts)
        if kind is None:
            return None
        heading = f"{kind} {name}" + ("" if kind == "module" else _parameters(thing))
        docstring = vars(thing).get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
    summary = answer_from(docstring) if isinstance(docstring, str) else None
    return Entry(name, f"{heading}: {summary or description}".removesuffix(": "))


def _thing(parts: Sequence[str]) -> object:
    """Return what a name stands for; None if it stands for nothing."""
    for length in range(len(parts), -1, -1):
        try:
            thing: object = importlib.import_module(".".join(parts[:length]) or "builtins")
        except ImportError:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part, None)
        return thing
    return None


def _kind(thing: object, parts: Sequence[str]) -> str | None:
    if inspect.ismodule(thing):
        return "module"
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, BaseException) else "class"
    if inspect.isroutine(thing):
        return "method" if inspect.isclass(_thing(parts[:-1])) else "function"
    return "property" if inspect.isdatadescriptor(thing) else None


def _parameters(thing: Any) -> str:
    """Return the names of the parameters in parentheses, as many as fit."""
    try:
        signature = inspect.signature(thing)
    except (AttributeError, TypeError, ValueError):  # functions in C, some with odd signatures
        return ""
    kept: list[str] = []
    for name in signature.parameters:
        if name in _UNTOLD or name.startswith("_"):
            continue
        if sum(map(len, kept)) + len(name) > MAX_PARAMETERS_CHARS:
            break
        kept.append(name)
    return f"({', '.join(kept)})"


def held_out_questions(
    entries: Sequence[Entry], descriptions: Sequence[Description]
) -> tuple[Question, ...]:
    """Return the questions about held-out entries that have one."""
    held_out = {entry.name: entry for entry in entries if entry.is_held_out}
    names: dict[str, list[str]] = {}
    for it in descriptions:
        if it.place == 0 and it.name in held_out and _asks(it.text, held_out[it.name]):
            names.setdefault(it.text, []).append(it.name)
    return tuple(Question(as_question(text), tuple(names[text])) for text in sorted(names))


def _asks(text: str, entry: Entry) -> bool:
    """Return whether a sentence can be a question: it repeats neither the summary nor the name."""
    asked, told = (set(terms(it)) - _COMMON_TERMS for it in (text, entry.summary))
    last = entry.name.rpartition(".")[2]
    is_word = last.isalpha() and last.islower()
    has_docstring = text != entry.summary
    return (
        has_docstring
        and len(text.split()) >= MIN_WORDS
        and len(asked & told) < MAX_SHARED * len(asked | told)
        and (is_word or last.lower() not in text.lower())
    )


def training_descriptions(
    entries: Sequence[Entry],
    descriptions: Iterable[Description],
    questions: Iterable[Question],
) -> tuple[Description, ...]:
    """Return the sentences about entries to train on, without those that hint at `questions`.

    A sentence with eight words in a row of a question, or with all words of it, is left out.
    """
    learned = {entry.name for entry in entries if not entry.is_held_out}
    asked = [words_of(it.question) for it in questions]
    known = {shingle for words in asked for shingle in shingles(words)}
    whole = set(asked)
    return tuple(
        it
        for it in descriptions
        if it.name in learned
        and words_of(as_question(it.text)) not in whole
        and known.isdisjoint(shingles(words_of(it.text)))
    )


def main() -> None:
    """Harvest the entries and the sentences about them, and hold the questions out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("sources", type=Path, help="a folder of .rst or .rst.txt files")
    entries, descriptions = harvest(tuple(read_descriptions(parser.parse_args().sources)))
    questions = held_out_questions(entries, descriptions)
    write_lines(MODEL_DIR / "entries.jsonl", entries)
    write_lines(MODEL_DIR / "held_out.jsonl", questions)
    write_lines(DESCRIPTIONS_PATH, training_descriptions(entries, descriptions, questions))
    sys.stdout.write(f"{len(entries)} entries, {len(questions)} held-out questions\n")


if __name__ == "__main__":
    main()
