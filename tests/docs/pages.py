"""The project's Markdown files: their headings, links and examples.

The info string of an example tells what becomes of it, in the words of k8s/README.md: `[tested]` is
run by a test, `[not run here: REASON]` is not.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT: Final = Path(__file__).resolve().parents[2]
FOREIGN: Final = {"node_modules", "build", "dist"}
"""Folders whose files are not the project's; nor are those of hidden folders, but `.github`."""

RUN: Final = {"sh", "bash", "python", "js"}
"""Languages whose blocks are examples to run."""

MARK: Final = re.compile(r"\[(tested|not run here: .+)\]")

_PARSER: Final = MarkdownIt("commonmark").enable("table")
_UNDEFINED: Final = re.compile(r"\[[^\]]+\]\[[^\]]*\]")
_ID: Final = re.compile(r"""\bid=["']([^"']+)["']""")
_SOURCE: Final = re.compile(r"""\b(?:src|href)=["']([^"']+)["']""")


@dataclass(frozen=True)
class Example:
    """A fenced block of code."""

    page: str  # the file, from the project's root
    line: int  # of its fence, from 1
    language: str  # the first word of the info string, or ""
    mark: str  # what stands in brackets behind it, or ""
    code: str  # what it holds

    def __str__(self) -> str:
        """Return where it stands, for a test's message."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the project's root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def tokens(self) -> list[Token]:
        """What the parser makes of it."""
        return _parse(self.path)

    @property
    def inlines(self) -> list[Token]:
        """All tokens of its texts."""
        return [child for token in self.tokens for child in token.children or ()]

    @property
    def links(self) -> list[str]:
        """The targets of its links and images."""
        found = [
            str(token.attrs[name])
            for token in self.inlines
            for name in ("href", "src")
            if name in token.attrs
        ]
        return found + [source for text in self.html for source in _SOURCE.findall(text)]

    @property
    def undefined_references(self) -> list[str]:
        """Links of the form [text][name] without a definition; Markdown shows them as text."""
        texts = (token.content for token in self.inlines if token.type == "text")
        return [match for text in texts for match in _UNDEFINED.findall(text)]

    @property
    def anchors(self) -> set[str]:
        """What a link can name behind `#`: headings, as GitHub does it, and ids in HTML."""
        return _anchors(self)

    @property
    def examples(self) -> list[Example]:
        """Its fenced blocks of code."""
        fences = (token for token in self.tokens if token.type == "fence")
        return [
            Example(
                self.name, token.map[0] + 1 if token.map else 0,
                *token.info.partition(" ")[::2], token.content,
            )
            for token in fences
        ]  # fmt: skip

    @property
    def indented_code(self) -> list[int]:
        """The lines of code without a fence, and so without a language and a mark."""
        blocks = (token for token in self.tokens if token.type == "code_block")
        return [block.map[0] + 1 for block in blocks if block.map]

    @property
    def html(self) -> list[str]:
        """The pieces of HTML in it."""
        tokens: Sequence[Token] = [*self.tokens, *self.inlines]
        return [token.content for token in tokens if token.type in ("html_block", "html_inline")]

    @property
    def titles(self) -> Iterator[str]:
        """The texts of its headings."""
        for opening, inline in zip(self.tokens, self.tokens[1:], strict=False):
            if opening.type == "heading_open":
                parts = (part.content for part in inline.children or ())
                yield "".join(parts)


@cache
def _parse(path: Path) -> list[Token]:
    return _PARSER.parse(path.read_text(encoding="utf-8"))


@cache
def _anchors(page: Page) -> set[str]:
    slugs: dict[str, int] = {}
    for title in page.titles:
        name = slug(title)
        count = slugs[name] = slugs.get(name, -1) + 1
        if count:
            slugs[f"{name}-{count}"] = 0
    return slugs.keys() | {id_ for text in page.html for id_ in _ID.findall(text)}


def slug(title: str, separator: str = "-") -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def pages(folder: Path = ROOT) -> list[Page]:
    """Return the project's Markdown files."""
    return [Page(path) for path in sorted(_files(folder))]


def guides() -> list[Page]:
    """Return the pages whose examples are run: README.md and those in docs/."""
    return [page for page in pages() if page.path.parent.name == "docs" or page.name == "README.md"]


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name in FOREIGN or (path.name.startswith(".") and path.name != ".github"):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix == ".md":
            yield path
