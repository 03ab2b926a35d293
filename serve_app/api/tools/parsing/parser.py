"""Finds calls in an answer's text as it arrives, in the format that the model was taught.

Feed pieces, get events; finish at the end. Text is held back where it may be the beginning of a
mark, and white space where a call may follow. What turns out to be no call is text again: nothing
that the model wrote is lost but marks, and white space in front of calls and behind the last.

The states: in TEXT an opening mark is looked for; in OPENING what belongs to it; in CALL an object
is read; BETWEEN calls a separator or a closing mark is; the REST is text to the end.
"""

from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

from deployments.tool_call_format import ToolCallFormat
from serve_app.tool_calls.call_reader import CallReader
from serve_app.tool_calls.events import CallBroken, CallCut, CallEnded, CallStarted, Event, Text
from serve_app.tool_calls.object_scanner import BrokenObjectError


class _State(Enum):
    TEXT = auto()
    OPENING = auto()
    CALL = auto()
    BETWEEN = auto()
    REST = auto()


class ToolCallParser:
    """Parses one answer."""

    def __init__(
        self, known: ToolCallFormat, names: Collection[str], max_calls: int | None = None
    ) -> None:
        """Start in front of the answer.

        Args:
            known: How the model writes calls.
            names: The functions that were offered.
            max_calls: Behind so many calls nothing is told any more.
        """
        self._names = names
        self._max_calls = max_calls
        self._opening = (known.block[0] + known.call[0]).split()
        self._separator = known.separator.strip()
        self._closing = (known.call[1] + known.block[1]).strip()
        # Without an opening mark, a call is what the answer begins with, or it is none.
        self._state = _State.TEXT if self._opening else _State.CALL
        self._no_call = _State.TEXT if self._opening else _State.REST
        self._steps: Mapping[_State, Callable[[], bool]] = {
            _State.TEXT: self._read_text,
            _State.OPENING: self._read_opening,
            _State.CALL: self._read_call,
            _State.BETWEEN: self._read_between,
            _State.REST: self._read_rest,
        }
        self._events: list[Event] = []
        self._pending = ""  # what has arrived and was not looked at
        self._mark = ""  # what led to a call; it is text again if there is none
        self._reader = CallReader(0, names)
        self._num_told = 0  # characters of the reader's text that stand in events
        self._num_started = 0
        self._num_ended = 0
        self._is_behind_call = False

    def feed(self, text: str) -> list[Event]:
        """Take a piece of the answer; return what is certain now."""
        self._pending += text
        self._advance()
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Return what was held back: the answer is at its end.

        Args:
            is_cut: Whether the model would have written on. A call that was told in part is then
                no broken one.
        """
        if is_cut and self._num_told:
            self._events.append(CallCut(self._num_started - 1))
            return self._take()
        while self._state is _State.CALL and not self._is_full:
            self._break()
            self._advance()
        left = self._mark + self._pending
        is_closing = self._state is _State.BETWEEN and self._closing.startswith(left.strip())
        is_space = self._is_behind_call and not left.strip()
        if not (self._is_full or is_closing or is_space):
            self._tell(left)
        self._mark = self._pending = ""
        return self._take()

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self._num_ended >= self._max_calls

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _tell(self, text: str) -> None:
        if text:
            self._is_behind_call = False
            self._events.append(Text(text))

    def _advance(self) -> None:
        """Go from state to state until more text is needed: a step then returns false."""
        while not self._is_full and self._steps[self._state]():
            pass

    def _read_text(self) -> bool:
        mark = self._opening[0]
        at = self._pending.find(mark)
        if at < 0:
            split = len(self._pending) - _overlap(self._pending, mark)
            told = self._pending[:split].rstrip()
            self._pending = self._pending[len(told) :]
            self._tell(told)
            return False
        told = self._pending[:at].rstrip()
        self._tell(told)
        self._mark = self._pending[len(told) : at] + mark
        self._pending = self._pending[at + len(mark) :]
        self._state = _State.OPENING
        return True

    def _read_opening(self) -> bool:
        for mark in self._opening[1:]:
            found = self._pass(mark)
            if found is None:
                return False
            if not found:
                self._tell(self._mark)
                self._mark, self._state = "", self._no_call
                return True
        self._state = _State.CALL
        return True

    def _read_call(self) -> bool:
        text, self._pending = self._pending, ""
        try:
            gains = self._reader.feed(text)
        except BrokenObjectError:
            self._break()
            return True
        self._events += gains
        self._num_told = self._reader.num_told
        self._num_started += sum(isinstance(gain, CallStarted) for gain in gains)
        if self._reader.end is None:
            return False
        self._events.append(CallEnded(self._num_started - 1))
        self._num_ended += 1
        self._pending = self._reader.text[self._reader.end :]
        self._leave_call(_State.BETWEEN)
        self._is_behind_call = True
        return True

    def _break(self) -> None:
        """Make text of what was taken for a call; what was not told yet is looked at again."""
        text, num_told = self._reader.text, self._num_told
        if num_told:
            self._events.append(CallBroken(self._num_started - 1, self._mark + text[:num_told]))
            self._is_behind_call = False
        else:
            text = self._tell_mark() + text
        self._pending = text[num_told:] + self._pending
        self._leave_call(self._no_call)

    def _tell_mark(self) -> str:
        """Tell what led to no call; return what may yet belong to the mark of the next one.

        A mark of two parts may have taken the beginning of another for its second.
        """
        first = self._opening[0] if self._opening else ""
        if not first or first not in self._mark:
            self._tell(self._mark)
            return ""
        split = self._mark.index(first) + len(first)
        self._tell(self._mark[:split])
        return self._mark[split:]

    def _leave_call(self, state: _State) -> None:
        self._state = state
        self._mark = ""
        self._num_told = 0
        self._reader = CallReader(self._num_started, self._names)

    def _read_between(self) -> bool:
        for mark, state in ((self._separator, _State.CALL), (self._closing, self._no_call)):
            found = self._pass(mark) if mark else False
            if found is None:
                return False
            if found:
                self._mark = self._mark if state is _State.CALL else ""
                self._state = state
                return True
        self._state = self._no_call
        return True

    def _read_rest(self) -> bool:
        self._tell(self._pending)
        self._pending = ""
        return False

    def _pass(self, mark: str) -> bool | None:
        """Move a mark that stands next from `_pending` to `_mark`, white space before it too.

        Returns:
            Whether it stands there; None if more text must tell.
        """
        next_text = self._pending.lstrip()
        if next_text.startswith(mark):
            split = len(self._pending) - len(next_text) + len(mark)
            self._mark += self._pending[:split]
            self._pending = self._pending[split:]
            return True
        return None if mark.startswith(next_text) else False


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
