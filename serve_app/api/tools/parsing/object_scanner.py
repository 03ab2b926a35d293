"""Finds where the parts of a JSON object end, while its text arrives.

It looks at brackets and strings alone, each character once; whether the whole is JSON is for a
decoder to say.
"""

import re
from typing import Final

MAX_DEPTH = 64
"""Deeper calls count as broken; decoders recurse."""

_OUTSIDE_STRINGS: Final = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS: Final = re.compile(r'["\\\x00-\x1f]')
_CLOSERS: Final = {"{": "}", "[": "]"}


class BrokenObjectError(ValueError):
    """The text is no JSON object."""


class ObjectScanner:
    """Scans one object; the caller keeps its text and lets it grow."""

    def __init__(self) -> None:
        """Start in front of the object."""
        self._position = 0
        self._closers: list[str] = []
        self._is_in_string = False

    def scan(self, text: str, depth: int) -> int | None:
        """Go on until a bracket closes that leaves `depth` others open.

        Args:
            text: All of the object that has arrived.
            depth: 0 is the object's own end.

        Returns:
            The place behind the bracket; None if it has not arrived.

        Raises:
            BrokenObjectError: Brackets don't match or are too many, or a string holds a control
                character.
        """
        while found := self._next(text):
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
            raise BrokenObjectError("a string holds a control character")
        return found

    def _skip_escaped(self, text: str) -> bool:
        """Pass by the character behind a backslash; if it is not here, go back and wait for it."""
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
