"""Tells a text's calls of tools from the text around them, character by character.

It is used only where a grammar binds the calls, so they are sound: a call ends where its first
bracket closes. Stop strings do not apply inside.
"""

from itertools import groupby


class CallSpans:
    """Divides one text.

    With a mark, what follows each mark is inside up to the bracket that closes the first one.
    Without, a text that begins with `{` is calls to its end.
    """

    __slots__ = ("_begins_call", "_depth", "_is_escaped", "_is_in_string", "_mark", "_tail")

    def __init__(self, mark: str) -> None:
        """Start before the text; see `SamplingParams.call_mark`."""
        self._mark = mark
        self._tail = ""  # the end of the text outside, as long as the mark
        self._depth: int | None = None  # brackets that are open; None outside
        self._is_in_string = False
        self._is_escaped = False
        self._begins_call: bool | None = None  # without a mark; None until it is known

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the newest text in parts, each with whether it is inside a call."""
        told = [(character, self._is_inside(character)) for character in text]
        return [
            ("".join(character for character, _ in group), is_inside)
            for is_inside, group in groupby(told, lambda each: each[1])
        ]

    def _is_inside(self, character: str) -> bool:
        if not self._mark:
            if self._begins_call is None and not character.isspace():
                self._begins_call = character == "{"
            return self._begins_call is not False
        if self._depth is not None:
            self._read(character, self._depth)
            return True
        self._tail = (self._tail + character)[-len(self._mark) :]
        if self._tail == self._mark:
            self._tail, self._depth = "", 0
        return False

    def _read(self, character: str, depth: int) -> None:
        """Count the brackets that are open, but those in strings."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth = depth + 1
        elif character in "}]":
            self._depth = depth - 1 if depth > 1 else None
