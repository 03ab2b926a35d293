"""The input of OpenAI's responses on the wire: the items that a conversation consists of.

Source: https://platform.openai.com/docs/api-reference/responses/create (input)
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deployments.contract.errors import InvalidRequestError
from serve_app.api.body.echoed_fields import IN_PARTS
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.conversation import Conversation, Turn
from serve_app.api.openai.prompt_schema import (
    ImageDetail,
    ImageUrl,
    refuse_many_parts,
)
from serve_app.api.tools.schema import MAX_CALL_ID_LENGTH, MAX_NAME_LENGTH, FunctionName

CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)]
ItemId = Annotated[str | None, Field(description="Accepted, but not read.")]
ItemStatus = Annotated[
    Literal["in_progress", "completed", "incomplete"] | None,
    Field(description="Accepted, but not read."),
]


class InputText(StrictBody):
    """A part that is text: a message's, or an answer's as it was reported."""

    type: Literal["input_text", "output_text"]
    text: str
    parsed: Any = Field(
        default=None,
        description="Accepted, but not read: what the openai package has read from the text.",
    )

    echoed: ClassVar[frozenset[str]] = IN_PARTS

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the text to a turn."""
        turn.add_text(self.text)


class InputRefusal(StrictBody):
    """A part in which the assistant has refused; the model sees it as text."""

    type: Literal["refusal"]
    refusal: str

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the text to a turn."""
        turn.add_refusal(self.refusal, place)


class InputImage(StrictBody):
    """A part that is an image."""

    type: Literal["input_image"]
    image_url: ImageUrl
    detail: ImageDetail = None

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the image to a turn."""
        turn.add_image(self.image_url, place, "image_url")


def _parts(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise wrong_type("a string or a list of parts")
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


InputPart = Annotated[InputText | InputImage | InputRefusal, Field(discriminator="type")]
# Lists are validated up to the first error: all errors of a large body would fill the memory.
InputParts = Annotated[
    list[InputPart],
    Field(fail_fast=True),
    BeforeValidator(_parts, json_schema_input_type=str | list[InputPart]),
]


class MessageItem(StrictBody):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="developer means system."
    )
    content: InputParts
    id: ItemId = None
    status: ItemStatus = None

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the message; the assistant's belongs to a turn with its reasoning and calls."""
        role = "system" if self.role == "developer" else self.role
        begin = conversation.turn if role == "assistant" else conversation.new_turn
        turn = begin(role, place)
        for at, part in enumerate(self.content):
            part.add_to(turn, f"{place}.content[{at}]")


def whole_name(namespace: str | None, name: str, param: str) -> str:
    """Return the name of a function as the model sees it.

    Args:
        namespace: The namespace that the function is offered in; None if in none.
        name: The function's own name.
        param: The name's place in the request.

    Raises:
        InvalidRequestError: It is longer than a function's name may be.
    """
    whole = name if namespace is None else f"{namespace}__{name}"
    if len(whole) > MAX_NAME_LENGTH:
        raise InvalidRequestError(
            f"A function's name and its namespace's must have at most {MAX_NAME_LENGTH - 2} "
            "characters together.",
            param,
        )
    return whole


class FunctionCallItem(StrictBody):
    """A call that the assistant has made, as an answer reported it."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    namespace: FunctionName | None = Field(
        default=None, description="The namespace that the function was offered in."
    )
    arguments: str = Field(
        description="A JSON object, as text. Arguments that a limit cut are taken as they stand."
    )
    id: ItemId = None
    status: ItemStatus = None
    parsed_arguments: Any = Field(
        default=None,
        description="Accepted, but not read: what the openai package has read from the arguments.",
    )

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the call to the assistant's turn."""
        name = whole_name(self.namespace, self.name, f"{place}.name")
        conversation.turn("assistant", place).call(self.call_id, name, self.arguments, place)


class FunctionOutputItem(StrictBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: InputParts = Field(
        description="Text and images, which the model sees behind the results."
    )
    id: ItemId = None
    status: ItemStatus = None

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the result as a turn of its own."""
        turn = conversation.result(self.call_id, place, "call_id")
        for at, part in enumerate(self.output):
            part.add_to(turn, f"{place}.output[{at}]")


class SummaryText(StrictBody):
    """A part of a summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(StrictBody):
    """A part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictBody):
    """The assistant's reasoning, as an answer reported it."""

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(
        default=[], fail_fast=True, description="Read only if there is no content."
    )
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = Field(
        default=None, description="The chat template decides what the model sees of it."
    )
    id: ItemId = None
    status: ItemStatus = None

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the reasoning to the assistant's turn."""
        turn = conversation.turn("assistant", place)
        for part in self.content or self.summary:
            turn.reasoning += part.text


InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
]


def _items(given: Any) -> Any:
    """Return the items, a text as the user's message, after counting them and their parts."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise wrong_type("a string or a list of items")
    refuse_many_parts(sum(map(_num_parts, given)))
    return [_typed(item) for item in given]


def _typed(item: Any) -> Any:
    """Return an item with its type, which messages need not name."""
    return {"type": "message", **item} if isinstance(item, dict) and "type" not in item else item


def _num_parts(item: Any) -> int:
    held = (
        [item.get(name) for name in ("content", "output", "summary")]
        if isinstance(item, dict)
        else []
    )
    return 1 + sum(len(each) for each in held if isinstance(each, list))


Input = Annotated[
    list[InputItem],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(
        _items, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]
    ),
]
