"""Reads descriptions of the standard library from the sources of Python's documentation.

The sources are reStructuredText with Sphinx's directives; Debian's package ``python3.11-doc``
has them. Only descriptions are read (``.. function:: name``): their prose, without code, tables
and notes on versions.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIN_CHARS: Final = 20
MAX_CHARS: Final = 240
MAX_SENTENCES: Final = 3
_DESCRIBED: Final = frozenset(
    """
    abstractmethod attribute awaitablemethod class classmethod coroutinefunction coroutinemethod
    data decorator decoratormethod exception function method module staticmethod
    """.split()  # noqa: SIM905 # a list of words is read more easily without quotes
)
_DIRECTIVE = re.compile(r"^\.\. (?:py:)?([a-z-]+):: *(.*)$")
_SYNOPSIS = re.compile(r"^:synopsis: *(.*)$")
_SIGNATURE = re.compile(r"^(?:async |await |abstractmethod )?([\w.]+)")
_ROLE = re.compile(r":(?:[a-z]+:)?[a-z]+:`([^`]+)`")
_TITLED = re.compile(r"^(.*?)\s*<[^>]*>$", re.DOTALL)
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_+")
_MARKS = re.compile(r"``|(?<!\w)\*{1,2}(?=\S)|(?<=\S)\*{1,2}(?!\w)|`|\\ ?|\|(?=\w)|(?<=\w)\|")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'(])")
_NO_PROSE = re.compile(r"^[-=~^*+#\"'`.:\s]*$|^\+[-=+]+|^\s*(>>>|\$ |\.\.\.|:param|[-*] )|^\|.*\|$")


@dataclass(frozen=True, slots=True)
class Description:
    """A sentence of a description.

    Attributes:
        name: The qualified name of what is described; builtins' names have no module.
        text: The sentence, without markup.
        place: The number of sentences of the description before it.
    """

    name: str
    text: str
    place: int


def read_descriptions(root: Path) -> Iterator[Description]:
    """Yield the first sentences of every description under a folder."""
    for path in sorted(root.rglob("*.rst*")):
        yield from Page(path.read_text(encoding="utf-8")).descriptions()


def plain(text: str) -> str:
    """Return reStructuredText without its inline markup, with single blanks."""
    text = _LINK.sub(r"\1", _ROLE.sub(_shown, text))
    return " ".join(_MARKS.sub("", text).split())


def _shown(role: re.Match[str]) -> str:
    content = role[1]
    if titled := _TITLED.match(content):
        return titled[1]
    return content.rsplit(".", 1)[-1] if content.startswith("~") else content.lstrip("!.")


@dataclass(slots=True)
class _Open:
    """A description that is being read: the lines of its body are indented more than `indent`."""

    indent: int
    names: tuple[str, ...]
    is_class: bool
    num_sentences: int = 0


class Page:
    """Reads one page, line by line, in order."""

    def __init__(self, source: str) -> None:
        self._lines = source.expandtabs(8).splitlines()
        self._module: str | None = None
        self._open: list[_Open] = []
        self._found: list[Description] = []

    def descriptions(self) -> list[Description]:
        """Return the first sentences of every description of the page."""
        at = 0
        while at < len(self._lines):
            at = self._read(at)
        return self._found

    def _read(self, at: int) -> int:
        """Read the directive or the paragraph that begins at a line; return the next line."""
        line = self._lines[at]
        if not line.strip():
            return at + 1
        indent = _indent(line)
        while self._open and indent <= self._open[-1].indent:
            self._open.pop()
        directive = _DIRECTIVE.match(line.strip())
        if directive is None:
            is_markup = line.strip().startswith(".. ")
            return self._skip_body(at + 1, indent) if is_markup else self._read_paragraph(at)
        kind, argument = directive.groups()
        if kind == "currentmodule":
            self._module = argument.strip()
            return at + 1
        if kind in _DESCRIBED:
            return self._read_heading(at, indent, kind, argument)
        return self._skip_body(at + 1, indent)

    def _read_heading(self, at: int, indent: int, kind: str, argument: str) -> int:
        signatures = [argument]
        at += 1
        while at < len(self._lines) and self._lines[at].strip():
            line = self._lines[at].strip()
            if synopsis := _SYNOPSIS.match(line):
                self._found.append(Description(argument.strip(), plain(synopsis[1]), 0))
            elif not line.startswith(":"):
                is_rest = signatures[-1].endswith(("\\", ","))
                signatures[-1:] = [signatures[-1] + line] if is_rest else [signatures[-1], line]
            at += 1
        if kind == "module":
            self._module = argument.strip()
            self._open.clear()
            return at
        found = [match[1] for it in signatures if (match := _SIGNATURE.match(it))]
        names = tuple(map(self._qualified, found))
        self._open.append(_Open(indent, names, kind in ("class", "exception")))
        return at

    def _qualified(self, name: str) -> str:
        owner = next((it for it in reversed(self._open) if it.is_class and it.names), None)
        if owner is not None and "." not in name:
            return f"{owner.names[0]}.{name}"
        if self._module in (None, "builtins") or name.startswith(f"{self._module}."):
            return name
        return f"{self._module}.{name}"

    def _skip_body(self, at: int, indent: int) -> int:
        """Return the next line that is indented no more than `indent`."""
        while at < len(self._lines):
            if self._lines[at].strip() and _indent(self._lines[at]) <= indent:
                break
            at += 1
        return at

    def _read_paragraph(self, at: int) -> int:
        start = at
        while at < len(self._lines) and self._lines[at].strip():
            at += 1
        lines = self._lines[start:at]
        if self._open and not any(map(_NO_PROSE.match, lines)):
            self._add(self._open[-1], " ".join(lines))
        is_before_code = lines[-1].rstrip().endswith("::")
        return self._skip_body(at, _indent(lines[0])) if is_before_code else at

    def _add(self, opened: _Open, paragraph: str) -> None:
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            text, place = plain(sentence), opened.num_sentences
            opened.num_sentences += 1
            if place < MAX_SENTENCES and (place == 0 or len(text) >= MIN_CHARS):
                self._found += [Description(name, _bounded(text), place) for name in opened.names]


def _bounded(text: str) -> str:
    """Return the text, or the words of it that fit."""
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS + 1].rpartition(" ")[0]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
