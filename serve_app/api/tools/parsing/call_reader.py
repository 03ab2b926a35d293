"""Reads the JSON object of one call: `{"name": ..., "arguments": {...}}`.

As models write it, the name comes first: the arguments are then told as they arrive. In any other
order the call is told when it is whole.
"""

import json
import re
from collections.abc import Collection
from typing import Any, Final, NoReturn

from serve_app.tool_calls.events import ArgumentsGained, CallStarted
from serve_app.tool_calls.object_scanner import BrokenObjectError, ObjectScanner

ARGUMENTS_KEYS: Final = ("arguments", "parameters")
"""Models of either habit fall into the other's now and then."""

_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,'
    rf'\s*"(?:{"|".join(ARGUMENTS_KEYS)})"\s*:\s*(?=\{{)'
)

Gain = CallStarted | ArgumentsGained


class CallReader:
    """One call.

    Attributes:
        text: All that was fed.
        num_told: Characters of it that the events have told; 0 before the call has started.
        end: The place behind the object; None before it is whole.
    """

    def __init__(self, index: int, names: Collection[str]) -> None:
        """Start in front of the object.

        Args:
            index: The call's place among those of the answer.
            names: The functions that may be called; anything else is no call.
        """
        self.text = ""
        self.num_told = 0
        self.end: int | None = None
        self._index = index
        self._names = names
        self._scanner = ObjectScanner()
        self._name: str | None = None
        self._arguments_start = 0
        self._arguments_end: int | None = None

    def feed(self, text: str) -> list[Gain]:
        """Take text; return what it has told of the call.

        Raises:
            BrokenObjectError: This is no call. Events of it that were returned stand.
        """
        self.text += text
        if self.text.lstrip()[:1] not in ("", "{"):
            raise BrokenObjectError("a call is an object")
        gains = self._start() if self._name is None else []
        if self._name is not None and self._arguments_end is None:
            gains += self._read_arguments()
            if self._arguments_end is None:
                return gains
        self.end = self._scanner.scan(self.text, depth=0)
        return gains if self.end is None else gains + self._finish(self.end)

    def _start(self) -> list[Gain]:
        head = _HEAD.match(self.text)
        if head is None:
            return []
        if head[1] not in self._names:
            raise BrokenObjectError("no such function was offered")
        self._name = head[1]
        self._arguments_start = self.num_told = head.end()
        return [CallStarted(self._index, self._name)]

    def _read_arguments(self) -> list[Gain]:
        self._arguments_end = self._scanner.scan(self.text, depth=1)
        end = len(self.text) if self._arguments_end is None else self._arguments_end
        gained, self.num_told = self.text[self.num_told : end], end
        return [ArgumentsGained(self._index, gained)] if gained else []

    def _finish(self, end: int) -> list[Gain]:
        """Check the whole object; tell of it if nothing was told yet.

        Raises:
            BrokenObjectError: It is not JSON, or not what was told.
        """
        call = _decode_object(self.text[:end])
        arguments = next((call[key] for key in ARGUMENTS_KEYS if key in call), None)
        if self._name is not None:
            told = _decode_object(self.text[self._arguments_start : self._arguments_end])
            if (call["name"], arguments) != (self._name, told):
                raise BrokenObjectError("a key stands twice")
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
    """Return arguments as JSON; some models write the JSON as a string.

    Raises:
        BrokenObjectError: They are no object.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    decoded = _decode_object(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which the model wrote escaped: no answer can hold it bare.
        return json.dumps(decoded)
    return text


def _decode_object(text: str) -> dict[str, Any]:
    try:
        decoded = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BrokenObjectError("this is not JSON") from error
    if not isinstance(decoded, dict):
        raise BrokenObjectError("this is no object")
    return decoded


def _refuse_constant(name: str) -> NoReturn:
    raise BrokenObjectError(f"{name} is not JSON")
