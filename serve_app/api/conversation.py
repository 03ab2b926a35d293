"""A conversation in a request, as turns that know their places there.

APIs divide turns differently: a tool's results stand in the user's turn, or calls beside the
assistant's text. So each surface says where a turn, an image or a call comes from, and an error
about it names the client's own field. `PromptReader` makes the contract's messages of the turns.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import TextPart, ToolCall
from serve_app.api.tools.schema import to_arguments

Role = Literal["system", "user", "assistant", "tool"]

BETWEEN_MESSAGES: Final = "\n\n"


@dataclass(frozen=True, slots=True)
class GivenImage:
    """A part that is an image, which is not read yet.

    Attributes:
        url: Its URL, or a `data:` URI.
        place: The part's place.
        url_place: The URL's place.
    """

    url: str = field(repr=False)
    place: str
    url_place: str


@dataclass(slots=True)
class Turn:
    """A message in the making.

    Attributes:
        role: Whose turn it is.
        place: Where it begins in the request.
        tool_call_id: The call that a tool's turn answers.
        id_place: The place of `tool_call_id`.
        tools_place: What an error names if the model knows no tools; empty means `place`.
        parts: The content.
        calls: The assistant's calls, each with the place of its id.
        reasoning: The assistant's reasoning.
    """

    role: Role
    place: str
    tool_call_id: str | None = None
    id_place: str = ""
    tools_place: str = ""
    parts: list[TextPart | GivenImage] = field(default_factory=list)
    calls: list[tuple[ToolCall, str]] = field(default_factory=list)
    reasoning: str = ""
    _latest: str = ""
    _is_interrupted: bool = False
    _ends_in_text: bool = False

    def resume(self, place: str) -> None:
        """Go on with a message of the same role, which may be another one than the last."""
        self._is_interrupted |= self._latest not in ("", place)
        self._latest = place

    def add_text(self, text: str) -> None:
        """Append a text.

        The texts of two messages that meet become one part with a blank line between, because chat
        templates join parts, and trim them.
        """
        last = self.parts[-1] if self._is_interrupted and self._ends_in_text else None
        if isinstance(last, TextPart):
            self.parts[-1] = TextPart(f"{last.text}{BETWEEN_MESSAGES}{text}")
            self._is_interrupted = False
        else:
            self._append(TextPart(text))
        self._ends_in_text = True

    def add_refusal(self, text: str, place: str) -> None:
        """Append what the assistant has refused with; the model sees it as text.

        Raises:
            InvalidRequestError: It is not the assistant's turn.
        """
        if self.role != "assistant":
            raise InvalidRequestError("Only the assistant's messages hold refusals.", place)
        self._append(TextPart(text))

    def add_image(self, url: str, place: str, url_field: str) -> None:
        """Append the image in the part at a place, whose field holds the URL."""
        self._append(GivenImage(url, place, f"{place}.{url_field}"))

    def _append(self, part: TextPart | GivenImage) -> None:
        self.parts.append(part)
        self._is_interrupted = self._ends_in_text = False

    def call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Append a call that the assistant has made.

        Args:
            call_id: The call's id.
            name: The function's name.
            arguments: A JSON object, or whatever the model has written instead.
            place: The place of the id.
        """
        self.calls.append((ToolCall(call_id, name, to_arguments(arguments)), place))


@dataclass(slots=True)
class Conversation:
    """The turns of a request, at least one once it is whole."""

    turns: list[Turn] = field(default_factory=list)

    def turn(self, role: Role, place: str) -> Turn:
        """Return the current turn if it has this role, else a new one."""
        if not self.turns or self.turns[-1].role != role:
            return self.new_turn(role, place)
        self.turns[-1].resume(place)
        return self.turns[-1]

    def new_turn(self, role: Role, place: str) -> Turn:
        """Return a new turn, also where the current one has the same role."""
        self.turns.append(Turn(role, place))
        self.turns[-1].resume(place)
        return self.turns[-1]

    def result(self, call_id: str, place: str, id_field: str) -> Turn:
        """Return a new turn for the result of a call, whose id is in a field at the place."""
        self.turns.append(Turn("tool", place, call_id, f"{place}.{id_field}"))
        return self.turns[-1]
