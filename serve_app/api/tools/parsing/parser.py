"""Finds calls in an answer's text as it arrives, in the model's own format.

Feed text to get events; call `finish` at the end. Text is held back while it may be the beginning
of a mark, and white space while a call may follow. Text that turns out not to be a call is reported
as text. So nothing that the model wrote is lost, except marks, and white space before calls and
after the last one. If the answer is cut off, its end is lost too where it had begun as a call, or
may have: half a mark is never text.

The states: TEXT looks for an opening mark; OPENING reads the rest of the mark; CALL reads an
object; BETWEEN looks for a separator or a closing mark; REST is text to the end.
"""

from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

from deployments.contract.formats.tool_call_format import ToolCallFormat
from serve_app.api.partial_match import num_overlapping
from serve_app.api.tools.parsing.call_reader import CallReader
from serve_app.api.tools.parsing.events import (
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    Event,
    Text,
)


class _State(Enum):
    TEXT = auto()
    OPENING = auto()
    CALL = auto()
    BETWEEN = auto()
    REST = auto()


class ToolCallParser:
    """Parses one answer."""

    def __init__(
        self,
        known: ToolCallFormat,
        names: Collection[str],
        max_calls: int | None = None,
        *,
        must_call: bool = False,
    ) -> None:
        """Start before the answer.

        Args:
            known: How the model writes calls.
            names: The functions that may be called.
            max_calls: After this many calls, nothing more is reported.
            must_call: Whether a grammar makes the answer only calls, so that its end is never text.
        """
        self._must_call = must_call
        self._names = names
        self._max_calls = max_calls
        self._opening = (known.block[0] + known.call[0]).split()
        self._separator = known.separator.strip()
        self._closing = (known.call[1] + known.block[1]).strip()
        # Without an opening mark, only the beginning of an answer can be a call.
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
        self._pending = ""  # text that has arrived, but was not read yet
        self._mark = ""  # the marks before a call, reported as text if no call follows
        self._reader = CallReader(0, names)
        self._num_reported = 0  # characters of the reader's text that events have reported
        self._num_started = 0
        self._num_ended = 0
        self._is_behind_call = False

    def feed(self, text: str) -> list[Event]:
        """Take more of the answer's text, and return the events that are certain now."""
        self._pending += text
        self._advance()
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the answer and return the events of the text that was held back.

        Args:
            is_cut: Whether the answer ended at its maximum length. An incomplete call is then cut,
                not broken: it is reported if its name is complete, and else dropped.
        """
        if self._must_call or (is_cut and self._ends_in_call()):
            self._cut()
            return self._take()
        while self._state is _State.CALL and not self._is_full:
            self._break()
            self._advance()
        left = self._mark + self._pending
        is_closing = self._state is _State.BETWEEN and self._closing.startswith(left.strip())
        is_space = self._is_behind_call and not left.strip()
        if not (self._is_full or is_closing or is_space):
            self._report(left)
        self._mark = self._pending = ""
        return self._take()

    def _ends_in_call(self) -> bool:
        """Return whether what was held back is the beginning of a call, rather than text."""
        match self._state:
            case _State.TEXT:
                return num_overlapping(self._pending, self._opening[0]) > 0
            case _State.OPENING:
                return True
            case _State.CALL:
                # Without a mark, an object that is not yet known as a call may be the answer.
                return bool(self._num_reported or self._mark)
            case _:
                return False

    def _cut(self) -> None:
        """End the current call where the answer ends; drop what was not reported."""
        if self._state is _State.CALL and not self._is_full:
            name = None if self._num_reported else self._reader.name_so_far()
            if name is not None:
                self._events.append(CallStarted(self._num_started, name))
                self._num_started += 1
            if self._num_reported or name is not None:
                self._events.append(CallCut(self._num_started - 1))
        self._mark = self._pending = ""

    @property
    def _is_full(self) -> bool:
        return self._max_calls is not None and self._num_ended >= self._max_calls

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _report(self, text: str) -> None:
        if text:
            self._is_behind_call = False
            self._events.append(Text(text))

    def _advance(self) -> None:
        """Go from state to state until a step returns False, because it needs more text."""
        while not self._is_full and self._steps[self._state]():
            pass

    def _read_text(self) -> bool:
        mark = self._opening[0]
        at = self._pending.find(mark)
        if at < 0:
            split = len(self._pending) - num_overlapping(self._pending, mark)
            found = self._pending[:split].rstrip()
            self._pending = self._pending[len(found) :]
            self._report(found)
            return False
        found = self._pending[:at].rstrip()
        self._report(found)
        self._mark = self._pending[len(found) : at] + mark
        self._pending = self._pending[at + len(mark) :]
        self._state = _State.OPENING
        return True

    def _read_opening(self) -> bool:
        for mark in self._opening[1:]:
            found = self._pass(mark)
            if found is None:
                return False
            if not found:
                self._report(self._mark)
                self._mark, self._state = "", self._no_call
                return True
        self._state = _State.CALL
        return True

    def _read_call(self) -> bool:
        text, self._pending = self._pending, ""
        gains = self._reader.feed(text)
        self._events += gains
        self._num_reported = self._reader.num_reported
        self._num_started += sum(isinstance(gain, CallStarted) for gain in gains)
        if self._reader.is_broken:
            self._break()
            return True
        if self._reader.end is None:
            return False
        self._events.append(CallEnded(self._num_started - 1))
        self._num_ended += 1
        self._pending = self._reader.text[self._reader.end :]
        self._leave_call(_State.BETWEEN)
        self._is_behind_call = True
        return True

    def _break(self) -> None:
        """Turn the current call back into text; text that was not reported is read again."""
        text, num_reported = self._reader.text, self._num_reported
        if num_reported:
            self._events.append(CallBroken(self._num_started - 1, self._mark + text[:num_reported]))
            self._is_behind_call = False
        else:
            text = self._report_mark() + text
        self._pending = text[num_reported:] + self._pending
        self._leave_call(self._no_call)

    def _report_mark(self) -> str:
        """Report a mark without a call as text; return its end if that may start another mark.

        The second part of a two-part mark may really be the beginning of the next mark.
        """
        first = self._opening[0] if self._opening else ""
        if not first or first not in self._mark:
            self._report(self._mark)
            return ""
        split = self._mark.index(first) + len(first)
        self._report(self._mark[:split])
        return self._mark[split:]

    def _leave_call(self, state: _State) -> None:
        self._state = state
        self._mark = ""
        self._num_reported = 0
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
        self._report(self._pending)
        self._pending = ""
        return False

    def _pass(self, mark: str) -> bool | None:
        """Move a mark that comes next, and white space before it, from `_pending` to `_mark`.

        Returns:
            Whether the mark comes next; None if that needs more text.
        """
        next_text = self._pending.lstrip()
        if next_text.startswith(mark):
            split = len(self._pending) - len(next_text) + len(mark)
            self._mark += self._pending[:split]
            self._pending = self._pending[split:]
            return True
        return None if mark.startswith(next_text) else False
