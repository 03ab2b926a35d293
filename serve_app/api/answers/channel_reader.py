"""Reads answers that are messages on channels, as gpt-oss writes them (harmony).

A message is a header and a text, `<|channel|>analysis<|message|>...<|end|>`, and each but the first
begins with `<|start|>assistant`. The channel `analysis` is reasoning, `final` is for the user, and
so is `commentary`. If the header names a function (`to=functions.NAME`), the text is the object of
a call's arguments. Such a text that is no call is for the user, like text without a header.

The states: HEADER reads up to `<|message|>`; BODY reads a message's text up to its end. A header
that another mark ends has no text, and is left out.

Source: OpenAI, Harmony response format, https://cookbook.openai.com/articles/openai-harmony
"""

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Final, NoReturn

from serve_app.api.partial_match import num_overlapping
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.tools.parsing.call_reader import CallReader
from serve_app.api.tools.parsing.events import (
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    Event,
    Text,
)

BODY_MARK: Final = "<|message|>"
START_MARK: Final = "<|start|>"
CHANNEL_MARK: Final = "<|channel|>"
NEXT_MARKS: Final = (START_MARK, CHANNEL_MARK)
"""Marks of a message that follows; a text before them has lost its own end."""
END_MARKS: Final = ("<|end|>", "<|call|>", "<|return|>", *NEXT_MARKS)

MAX_HEADER_LENGTH: Final = 512
"""Characters of a header, of which a function's name takes at most 128."""

_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION: Final = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]{1,128})")

_HEADER_ENDS: Final = (BODY_MARK, *END_MARKS)
_HEADER_END: Final = re.compile("|".join(map(re.escape, _HEADER_ENDS)))
_HEADER_MARKS: Final = (*NEXT_MARKS, "<|constrain|>")
_HEADER_STARTS: Final = (*_HEADER_MARKS, "to=")

_GAPS: Final = {Reasoning: "\n", Text: "\n\n"}
"""What stands between the texts of two messages that are told as one."""


class _Kind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class ChannelReader:
    """Reads one answer."""

    def __init__(self, names: Collection[str] = (), max_calls: int | None = None) -> None:
        """Start before the answer.

        Args:
            names: The functions that may be called; a message to another one is text.
            max_calls: After this many calls, nothing more is reported.
        """
        self._names = names
        self._max_calls = max_calls
        self._pending = ""  # text that has arrived, but was not read yet
        self._kind: _Kind | None = None  # of the message whose text is read; None in a header
        self._name = ""
        self._reader = CallReader(0, names)
        self._head = ""  # what the reader was given before the arguments
        self._num_started = self._num_ended = 0
        self._events: list[Reasoning | Event] = []
        self._told: set[type[Reasoning | Text]] = set()
        self._is_first = True  # nothing of the current message has been reported

    def feed(self, text: str) -> list[Reasoning | Event]:
        """Take more of the answer's text, and return the events that are certain now."""
        self._pending += text
        while not self._is_full and (
            self._read_header() if self._kind is None else self._read_body()
        ):
            pass
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[Reasoning | Event]:
        """End the answer and return the events of the text that was held back.

        The token that ends an answer is not in its text, so its last call is whole.

        Args:
            is_cut: Whether the answer ended at its maximum length. An incomplete call is then cut,
                not broken, and what may begin a mark or a header is dropped.
        """
        if self._is_full:
            return []
        left, self._pending = self._pending, ""
        if self._kind is None and not is_cut and _is_text(left):
            self._open(_Kind.TEXT)
        if self._kind is _Kind.CALL and is_cut:
            self._cut_call()
        elif self._kind is not None:
            self._report("" if is_cut else left)
            self._close()
        return self._take()

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self._num_ended >= self._max_calls

    def _take(self) -> list[Reasoning | Event]:
        taken, self._events = self._events, []
        return taken

    def _read_header(self) -> bool:
        header, mark = _split_header(self._pending)
        if not _may_be_header(header, mark):
            self._open(_Kind.TEXT)
            # One character ahead: the mark of a header that is too long would begin one again.
            self._report(self._pending[:1])
            self._pending = self._pending[1:]
            return True
        if mark is None:
            return False
        self._pending = self._pending[len(header) + (0 if mark in NEXT_MARKS else len(mark)) :]
        if mark == BODY_MARK:
            self._open_message(header)
        return True

    def _open_message(self, header: str) -> None:
        function, channel = _FUNCTION.search(header), _CHANNEL.search(header)
        if function is not None and function[1] in self._names:
            self._open(_Kind.CALL)
            self._name = function[1]
            self._reader = CallReader(self._num_started, self._names)
            self._head = f'{{"name": "{self._name}", "arguments": '
            self._reader.feed(self._head)
        elif channel is not None and channel[1] == "analysis":
            self._open(_Kind.REASONING)
        else:
            self._open(_Kind.TEXT)

    def _open(self, kind: _Kind) -> None:
        self._kind, self._is_first = kind, True

    def _read_body(self) -> bool:
        found = [(at, mark) for mark in END_MARKS if (at := self._pending.find(mark)) >= 0]
        if not found:
            held = max(num_overlapping(self._pending, mark) for mark in END_MARKS)
            split = len(self._pending) - held
            text, self._pending = self._pending[:split], self._pending[split:]
            self._report(text)
            return False
        at, mark = min(found)
        text = self._pending[:at]
        self._pending = self._pending[at if mark in NEXT_MARKS else at + len(mark) :]
        self._report(text)
        self._close()
        return True

    def _report(self, text: str) -> None:
        """Report more of the current message's text."""
        if self._kind is _Kind.CALL:
            self._read_call(text)
            return
        kind: type[Reasoning | Text] = Reasoning if self._kind is _Kind.REASONING else Text
        if text:
            gap = _GAPS[kind] if self._is_first and kind in self._told else ""
            self._events.append(kind(gap + text))
            self._told.add(kind)
            self._is_first = False

    def _read_call(self, text: str) -> None:
        gains = self._reader.feed(text)
        self._events += gains
        self._num_started += sum(isinstance(gain, CallStarted) for gain in gains)
        if self._reader.is_broken:
            self._break_call()

    def _break_call(self) -> None:
        """Turn the current call back into text."""
        text, num_reported = self._reader.text, self._reader.num_reported
        if num_reported:
            raw = text[len(self._head) : num_reported]
            self._events.append(CallBroken(self._num_started - 1, raw))
        self._open(_Kind.TEXT)
        self._is_first = not num_reported
        self._report(text[max(num_reported, len(self._head)) :])

    def _close(self) -> None:
        """End the current message."""
        if self._kind is _Kind.CALL and not _is_object(self._reader.text[len(self._head) :]):
            self._break_call()
        elif self._kind is _Kind.CALL:
            self._read_call("}")
            assert self._reader.end is not None, "a whole object is a whole call"
            self._events.append(CallEnded(self._num_started - 1))
            self._num_ended += 1
        self._kind = None

    def _cut_call(self) -> None:
        if not self._reader.num_reported:
            self._events.append(CallStarted(self._num_started, self._name))
            self._num_started += 1
        self._events.append(CallCut(self._num_started - 1))


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object, as readers of calls take it."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _split_header(text: str) -> tuple[str, str | None]:
    """Return the header that a text begins with, and the mark behind it; None if it has none yet.

    `<|start|>` may only begin a header, and a second `<|channel|>` begins the next one.
    """
    start = len(text) - len(text.lstrip())
    has_channel = False
    for found in _HEADER_END.finditer(text):
        if found[0] == CHANNEL_MARK and not has_channel:
            has_channel = True
        elif found[0] != START_MARK or found.start() > start:
            return text[: found.start()], found[0]
    return text, None


def _may_be_header(text: str, mark: str | None) -> bool:
    """Return whether a text is a header, or may become one.

    Args:
        text: It begins as a header.
        mark: What ends it; None if the end has not arrived.
    """
    told = text.lstrip()
    has_shape = not told or told.startswith(_HEADER_STARTS)
    if mark is not None:
        is_whole = has_shape and (mark == BODY_MARK or not _is_text(text))
        return is_whole and len(text) <= MAX_HEADER_LENGTH
    has_begun = any(each.startswith(told) for each in (*_HEADER_STARTS, *_HEADER_ENDS))
    # What may begin the mark behind the header is no part of it: its length never shrinks.
    held = max(num_overlapping(text, each) for each in _HEADER_ENDS)
    return (has_shape or has_begun) and len(text) - held <= MAX_HEADER_LENGTH


def _is_text(left: str) -> bool:
    """Return whether what no `<|message|>` follows is text: it has no mark of a header."""
    return bool(left.strip()) and not any(mark in left for mark in _HEADER_MARKS)
