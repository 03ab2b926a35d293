"""Reads the JSON object of one call: `{"name": ..., "arguments": {...}}`.

If the model writes the name first, the arguments are reported as they arrive. With the keys in any
other order, the call is reported once it is complete.
"""

import json
import re
from collections.abc import Collection
from typing import Any, Final, NoReturn

from serve_app.api.tools.parsing.events import ArgumentsGained, CallStarted
from serve_app.api.tools.parsing.object_scanner import BrokenObjectError, ObjectScanner

ARGUMENTS_KEYS: Final = ("arguments", "parameters")
"""Models trained on one of these keys occasionally write the other one."""

_NAME: Final = r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,128})"'
_NAMED: Final = re.compile(_NAME)
_HEAD: Final = re.compile(rf'{_NAME}\s*,\s*"(?:{"|".join(ARGUMENTS_KEYS)})"\s*:\s*(?=\{{)')

Gain = CallStarted | ArgumentsGained


class CallReader:
    """Reads one call.

    Attributes:
        text: All text fed so far.
        num_reported: Characters of `text` that events have reported; 0 before the call has started.
        end: The index after the object; None until it is complete.
        is_broken: Whether the text has turned out not to be a call. Nothing may be fed any more.
    """

    def __init__(self, index: int, names: Collection[str]) -> None:
        """Start before the object.

        Args:
            index: The call's place among the calls of the answer.
            names: The functions that may be called; an object with another name is not a call.
        """
        self.text = ""
        self.num_reported = 0
        self.end: int | None = None
        self.is_broken = False
        self._index = index
        self._names = names
        self._scanner = ObjectScanner()
        self._name: str | None = None
        self._arguments_start = 0
        self._arguments_end: int | None = None

    def feed(self, text: str) -> list[Gain]:
        """Take text and return the events that it causes, those before a break included.

        So the events do not depend on where the text was cut into pieces.
        """
        self.text += text
        gains: list[Gain] = []
        try:
            self._read(gains)
        except BrokenObjectError:
            self.is_broken = True
        return gains

    def _read(self, gains: list[Gain]) -> None:
        """Add the events of what has arrived.

        Raises:
            BrokenObjectError: The text is not a call. Events already added stay.
        """
        if self.text.lstrip()[:1] not in ("", "{"):
            raise BrokenObjectError("a call is an object")
        if self._name is None:
            gains += self._start()
        if self._name is not None and self._arguments_end is None:
            try:
                self._arguments_end = self._scanner.scan(self.text, depth=1)
            except BrokenObjectError:
                gains += self._report_arguments(self._scanner.broken_at)
                raise
            gains += self._report_arguments(self._arguments_end or len(self.text))
            if self._arguments_end is None:
                return
        end = self._scanner.scan(self.text, depth=0)
        if end is not None:
            gains += self._finish(end)
            self.end = end

    def name_so_far(self) -> str | None:
        """Return the function's name if it is complete and comes first, though the call may not."""
        found = _NAMED.match(self.text)
        return found[1] if found is not None and found[1] in self._names else None

    def _start(self) -> list[Gain]:
        head = _HEAD.match(self.text)
        if head is None:
            return []
        if head[1] not in self._names:
            raise BrokenObjectError("no such function was offered")
        self._name = head[1]
        self._arguments_start = self.num_reported = head.end()
        return [CallStarted(self._index, self._name)]

    def _report_arguments(self, end: int) -> list[Gain]:
        gained, self.num_reported = self.text[self.num_reported : end], end
        return [ArgumentsGained(self._index, gained)] if gained else []

    def _finish(self, end: int) -> list[Gain]:
        """Check the complete object, and return its events if none were returned before.

        Raises:
            BrokenObjectError: It is not JSON, or it differs from what was reported.
        """
        call = _decode_object(self.text[:end])
        arguments = next((call[key] for key in ARGUMENTS_KEYS if key in call), None)
        if self._name is not None:
            reported = _decode_object(self.text[self._arguments_start : self._arguments_end])
            if (call["name"], arguments) != (self._name, reported):
                raise BrokenObjectError("a key occurs twice")
            return []
        name = call.get("name")
        if not isinstance(name, str) or name not in self._names:
            raise BrokenObjectError("no such function was offered")
        self._name = name
        return [
            CallStarted(self._index, name),
            ArgumentsGained(self._index, _as_json(arguments)),
        ]


def _as_json(arguments: Any) -> str:
    """Return arguments as JSON. Some models write the JSON inside a string.

    Raises:
        BrokenObjectError: They are not an object.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    decoded = _decode_object(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        # The model escaped half of a surrogate pair; an answer can only hold it escaped.
        return json.dumps(decoded)
    return text


def _decode_object(text: str) -> dict[str, Any]:
    try:
        decoded = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BrokenObjectError("this is not JSON") from error
    if not isinstance(decoded, dict):
        raise BrokenObjectError("this is not an object")
    return decoded


def _refuse_constant(name: str) -> NoReturn:
    raise BrokenObjectError(f"{name} is not JSON")
