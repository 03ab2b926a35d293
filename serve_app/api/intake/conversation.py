"""Builds the messages of a prompt from those of an API that is not OpenAI's chat completions.

Such APIs divide a turn differently: a tool's results stand in the user's turn, or calls beside the
assistant's text. So each message here remembers the places it comes from, and an error about it
names those places.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from deployments.contract.errors import InvalidRequestError
from serve_app.api.openai.prompt_schema import MessageBody, PartBody, Role, TextPartBody
from serve_app.api.tools.schema import CalledFunctionBody, ToolCallBody

Names = Sequence[tuple[str, str]]
"""Patterns in the paths of chat completions' fields, each with the API's own name."""

BETWEEN_MESSAGES: Final = "\n\n"

_MESSAGE: Final = re.compile(r"messages\[(\d+)\](?:\.(content|tool_calls)\[(\d+)\])?")


@dataclass(slots=True)
class Turn:
    """A message in the making.

    Attributes:
        role: Whose turn it is.
        place: Where it begins in the request.
        tool_call_id: The call that a tool's turn answers.
    """

    role: Role
    place: str
    tool_call_id: str | None = None
    _parts: list[PartBody] = field(default_factory=list)
    _calls: list[ToolCallBody] = field(default_factory=list)
    _places: dict[tuple[str, int], str] = field(default_factory=dict)
    _thoughts: list[str] = field(default_factory=list)
    _latest: str = ""
    _is_interrupted: bool = False

    def resume(self, place: str) -> None:
        """Go on with a message of the same role, which may be another one than the last."""
        self._is_interrupted |= self._latest not in ("", place)
        self._latest = place

    def add(self, part: PartBody, place: str) -> None:
        """Append a part, and remember its place in the request.

        The texts of two messages that meet become one part with a blank line between, because chat
        templates join parts, and trim them.
        """
        last = self._parts[-1] if self._parts else None
        is_interrupted, self._is_interrupted = self._is_interrupted, False
        if is_interrupted and isinstance(last, TextPartBody) and isinstance(part, TextPartBody):
            text = f"{last.text}{BETWEEN_MESSAGES}{part.text}"
            self._parts[-1] = TextPartBody(type="text", text=text)
            return
        self._places["content", len(self._parts)] = place
        self._parts.append(part)

    def call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Append a call that the assistant has made, with its arguments as JSON."""
        self._places["tool_calls", len(self._calls)] = place
        function = CalledFunctionBody(name=name, arguments=arguments)
        self._calls.append(ToolCallBody(id=call_id, function=function))

    def think(self, text: str) -> None:
        """Append to the assistant's reasoning."""
        self._thoughts.append(text)

    def place_of(self, kind: str | None, index: str | None) -> str:
        """Return the place of a part or of a call in the request, else of the whole turn."""
        return self._places.get((kind or "", int(index or 0)), self.place)

    def body(self) -> MessageBody:
        """Return the message; one that holds nothing becomes an empty text."""
        thoughts = "".join(self._thoughts)
        is_empty = not (self._parts or self._calls or thoughts)
        return MessageBody(
            role=self.role,
            content=[TextPartBody(type="text", text="")] if is_empty else self._parts,
            tool_calls=self._calls or None,
            tool_call_id=self.tool_call_id,
            reasoning_content=thoughts or None,
        )


class Conversation:
    """Collects turns, and joins those that an API counts as one."""

    def __init__(self, names: Names) -> None:
        """Start without a turn.

        Args:
            names: How errors name the request's fields.
        """
        self._names = names
        self._turns: list[Turn] = []

    def turn(self, role: Role, place: str) -> Turn:
        """Return the current turn if it has this role, else a new one."""
        if not self._turns or self._turns[-1].role != role:
            return self.new_turn(role, place)
        self._turns[-1].resume(place)
        return self._turns[-1]

    def new_turn(self, role: Role, place: str) -> Turn:
        """Return a new turn, also where the current one has the same role."""
        self._turns.append(Turn(role, place))
        self._turns[-1].resume(place)
        return self._turns[-1]

    def result(self, call_id: str, place: str) -> Turn:
        """Return a new turn for the result of a call."""
        self._turns.append(Turn("tool", place, call_id))
        return self._turns[-1]

    def bodies(self) -> list[MessageBody]:
        """Return the messages."""
        return [turn.body() for turn in self._turns]

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Let errors about the request name the fields that the client has sent."""
        try:
            yield
        except InvalidRequestError as error:
            if error.param is not None:
                self._rename(error, error.param)
            raise

    def _rename(self, error: InvalidRequestError, old: str) -> None:
        new = _MESSAGE.sub(self._place, old, count=1)
        for pattern, name in self._names:
            new = re.sub(pattern, name, new)
        is_path = not old.isalpha()
        if is_path or error.message.startswith(f"{old} "):
            named = re.compile(rf"(?<![\w.]){re.escape(old)}(?!\w)")
            error.message = named.sub(lambda _: new, error.message)
        error.param = new

    def _place(self, found: re.Match[str]) -> str:
        return self._turns[int(found[1])].place_of(found[2], found[3])
