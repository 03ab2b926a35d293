"""Finds the ends of a JSON object and of its parts while the text arrives.

It only looks at brackets and strings, and at each character once. A decoder checks whether the
whole text is JSON.
"""

import re
from typing import Final

MAX_DEPTH = 64
"""The limit of open brackets. Deeper calls count as broken, because decoders recurse."""

_OUTSIDE_STRINGS: Final = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS: Final = re.compile(r'["\\\x00-\x1f]')
_CLOSERS: Final = {"{": "}", "[": "]"}


class BrokenObjectError(ValueError):
    """The text is not a JSON object."""


class ObjectScanner:
    """Scans one object; the caller keeps the text and appends to it.

    Attributes:
        broken_at: The index of the character that has raised; it is behind all that were sound.
    """

    def __init__(self) -> None:
        self.broken_at = 0
        self._position = 0
        self._closers: list[str] = []
        self._is_in_string = False

    def scan(self, text: str, depth: int) -> int | None:
        """Continue until a bracket closes and `depth` others are still open.

        Args:
            text: The object's text so far, from its beginning.
            depth: 0 looks for the end of the object itself.

        Returns:
            The index after the bracket; None if it has not arrived.

        Raises:
            BrokenObjectError: Brackets don't match or are too many, or a string holds a control
                character.
        """
        while found := self._next(text):
            self.broken_at = found.start()
            character, self._position = found[0], found.end()
            if self._is_in_string:
                if character == "\\" and not self._skip_escaped(text):
                    return None
                self._is_in_string = character != '"'
            elif character == '"':
                self._is_in_string = True
            elif character in _CLOSERS:
                self._open(character)
            else:
                self._close(character)
                if len(self._closers) == depth:
                    return self._position
        self._position = len(text)
        return None

    def _next(self, text: str) -> re.Match[str] | None:
        looked_for = _INSIDE_STRINGS if self._is_in_string else _OUTSIDE_STRINGS
        found = looked_for.search(text, self._position)
        if found and found[0] < " ":
            self.broken_at = found.start()
            raise BrokenObjectError("a string holds a control character")
        return found

    def _skip_escaped(self, text: str) -> bool:
        """Skip the character after a backslash; if it has not arrived, go back to the backslash."""
        is_here = self._position < len(text)
        self._position += 1 if is_here else -1
        return is_here

    def _open(self, bracket: str) -> None:
        if len(self._closers) == MAX_DEPTH:
            raise BrokenObjectError("too many brackets are open")
        self._closers.append(_CLOSERS[bracket])

    def _close(self, bracket: str) -> None:
        if not self._closers or self._closers.pop() != bracket:
            raise BrokenObjectError("brackets don't match")
