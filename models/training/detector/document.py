"""A document: one author's text, for training or held out, before it is cut into pieces."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

CACHE_DIR: Final = Path(__file__).parents[2] / "checkpoints" / "pydoc-detector"
"""Samples and checkpoints; git ignores it."""


class Label(StrEnum):
    """Who wrote a text."""

    HUMAN = "human"
    CHAT = "pydoc-chat"


class Source(StrEnum):
    """Where a document comes from, in the words of the evaluation."""

    TOPIC = "Python's help topics"
    DOCSTRING = "docstrings of the standard library"
    ANSWER = "answers about trained names"
    LONG_ANSWER = "answers about trained names, made to go on"
    UNKNOWN_NAME = "answers about made-up names"
    OPEN_QUESTION = "answers to open questions"
    COMPLETION = "completions of a few words"

    @property
    def label(self) -> Label:
        """The author."""
        return Label.HUMAN if self in (Source.TOPIC, Source.DOCSTRING) else Label.CHAT


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it comes from.

    Attributes:
        text: The whole text, with its original whitespace.
        source: The kind of text, which determines the author.
        origin: A module, a topic, or the name or question that pydoc-chat was asked about. All
            documents of one origin are on the same side of the split.
        temperature: Sampling temperature; None for people's texts.
    """

    text: str
    source: Source
    origin: str
    temperature: float | None = None

    @property
    def is_held_out(self) -> bool:
        """Whether the document is kept from training."""
        return is_held_out(self.origin)


def is_held_out(origin: str) -> bool:
    """Return whether an origin is kept for the evaluation: one in five is, by its checksum."""
    return zlib.crc32(origin.encode()) % 5 == 0


def write_documents(documents: Iterable[Document], path: Path) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps(asdict(document)) + "\n")


def read_documents(path: Path) -> tuple[Document, ...]:
    """Read what `write_documents` wrote."""
    with path.open(encoding="utf-8") as lines:
        return tuple(document_of(json.loads(line)) for line in lines)


def document_of(fields: dict[str, object]) -> Document:
    """Return the document of a JSON object, ignoring other fields."""
    temperature = fields["temperature"]
    assert temperature is None or isinstance(temperature, float)
    return Document(
        str(fields["text"]), Source(str(fields["source"])), str(fields["origin"]), temperature
    )
