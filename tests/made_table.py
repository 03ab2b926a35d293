"""Tables in documents that `make table` writes between two marks; a test compares each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class MadeTable:
    """A table in a document."""

    path: str  # the document, from the project's root
    name: str  # what the marks call the table
    make: Callable[[], str]  # returns the table in Markdown

    @property
    def begin(self) -> str:
        """The line before the table."""
        return f"<!-- The table of {self.name}: made by `make table` -->\n"

    @property
    def end(self) -> str:
        """The line after the table."""
        return f"<!-- The end of the table of {self.name} -->\n"

    def read(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    def write(self) -> None:
        """Write the table into the document."""
        (ROOT / self.path).write_text(self.put_into(self.read()), encoding="utf-8")

    def put_into(self, text: str) -> str:
        """Return a text with the table between its two marks.

        Raises:
            ValueError: A mark is missing.
        """
        before, _, rest = text.partition(self.begin)
        _, end, after = rest.partition(self.end)
        if not end:
            raise ValueError(f"{self.path} lacks the lines {self.begin!r} and {self.end!r}")
        return before + self.begin + self.make() + self.end + after
