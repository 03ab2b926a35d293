"""Prompts as OpenAI's clients send them: messages, or token ids.

All messages may hold text; a user's message may also hold images, and the assistant's may hold tool
calls. A tool's message holds the result of a call. An answer may come back as it was: with its
reasoning, and with fields that carry nothing. The number of parts or token ids is checked before
any of them is validated. The replica checks that token ids are in the model's vocabulary.
"""

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.body.cache_control import CacheControl
from serve_app.api.body.echoed_fields import IN_MESSAGES, IN_PARTS, Nothing, carries_nothing
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.conversation import Conversation, Turn
from serve_app.api.tools.schema import MAX_CALL_ID_LENGTH, ToolCallBody

MAX_NUM_TOKEN_IDS = 2**20
"""More than any model's context length; a body has room for ten times as many."""

MAX_TOKEN_ID = 2**31 - 1

MAX_NUM_PARTS = 4096
"""Most parts and calls in all messages. A body has room for a million, which would take seconds."""


class TextPartBody(StrictBody):
    """A part that is text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None

    echoed: ClassVar[frozenset[str]] = IN_PARTS

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the text to a turn."""
        turn.add_text(self.text)


ImageUrl = Annotated[
    str,
    Field(
        description="A data: URI with base64: PNG, JPEG, WebP or GIF, whatever type it names. Or "
        "an https: URL, if the server's configuration lists its host."
    ),
]
ImageDetail = Annotated[
    Literal["auto", "low", "high"] | None,
    Field(
        description="A hint, which changes nothing: images are processed as the model's "
        "configuration says."
    ),
]


class ImageUrlBody(StrictBody):
    """An image's data or its address."""

    url: ImageUrl
    detail: ImageDetail = None


class ImagePartBody(StrictBody):
    """A part that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrlBody
    cache_control: CacheControl = None

    echoed: ClassVar[frozenset[str]] = IN_PARTS

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the image to a turn."""
        turn.add_image(self.image_url.url, place, "image_url.url")


_NO_REASONING: Final[dict[str, Any]] = {
    "properties": {
        name: {"not": {"type": "string", "minLength": 1}}
        for name in ("reasoning", "reasoning_content", "refusal")
    }
}
_RULES: Final[dict[str, Any]] = {
    "allOf": [
        {
            "anyOf": [
                *(
                    {"properties": {name: {"not": {"enum": [None, []]}}}, "required": [name]}
                    for name in ("content", "tool_calls")
                ),
                {"not": _NO_REASONING},
            ]
        },
        {"anyOf": [_NO_REASONING, {"properties": {"role": {"const": "assistant"}}}]},
        {
            "anyOf": [
                {"properties": {"tool_calls": {"enum": [None, []]}}},
                {"properties": {"role": {"const": "assistant"}}},
            ]
        },
        {
            "if": {"properties": {"role": {"const": "tool"}}},
            "then": {
                "properties": {"tool_call_id": {"type": "string"}},
                "required": ["tool_call_id"],
            },
            "else": {"properties": {"tool_call_id": {"type": "null"}}},
        },
    ]
}
"""The rules of `MessageBody._check_role` as a JSON schema."""


class RefusalPartBody(StrictBody):
    """A part of the assistant's message in which it has refused; the model sees it as text."""

    type: Literal["refusal"]
    refusal: str

    echoed: ClassVar[frozenset[str]] = IN_PARTS

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the text to a turn."""
        turn.add_refusal(self.refusal, place)


PartBody = Annotated[TextPartBody | ImagePartBody | RefusalPartBody, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    if content is None:
        return []
    if not isinstance(content, str | list):
        raise wrong_type("a string or a list of parts")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _unless_nothing(value: Any) -> Any:
    return None if carries_nothing(value) else value


Reasoning = Annotated[
    str | None,
    BeforeValidator(_unless_nothing, json_schema_input_type=str | Nothing),
]


class ProviderFieldsBody(StrictBody):
    """The fields of an answer that litellm does not know, and its copy of the reasoning."""

    reasoning: Reasoning = None
    reasoning_content: Reasoning = None

    echoes_any: ClassVar[bool] = True


class MessageBody(StrictBody):
    """One message of a conversation."""

    model_config = ConfigDict(json_schema_extra=_RULES)

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer means system; tool holds the result of a call."
    )
    # Lists are validated up to the first error: all errors of a large body would fill the memory.
    content: Annotated[
        list[PartBody],
        BeforeValidator(_as_parts, json_schema_input_type=str | list[PartBody] | None),
    ] = Field(
        default=[], fail_fast=True, description="Null only if the assistant has called tools."
    )
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = Field(
        default=None, description="In the assistant's messages: the functions that it has called."
    )
    tool_call_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_CALL_ID_LENGTH,
        description="In a tool's messages: the call that it answers.",
    )
    name: str | None = Field(default=None, description="Accepted, but the model does not see it.")

    reasoning_content: Reasoning = Field(
        default=None,
        description="In the assistant's messages: its reasoning, as an answer reported it. The "
        "chat template decides what the model sees of it.",
    )
    reasoning: Reasoning = Field(default=None, description="Another name of reasoning_content.")
    refusal: Reasoning = Field(
        default=None,
        description="In the assistant's messages: what it has refused with; the model sees it as "
        "text.",
    )
    cache_control: CacheControl = None
    parsed: Any = Field(
        default=None,
        description="Accepted, but not read: what the openai package has read from the content.",
    )
    provider_specific_fields: ProviderFieldsBody | None = None

    echoed: ClassVar[frozenset[str]] = IN_MESSAGES

    @property
    def thoughts(self) -> str | None:
        """The assistant's reasoning, by any of its names."""
        found = self.reasoning_content or self.reasoning
        copied = self.provider_specific_fields
        if found or copied is None or self.role != "assistant":
            return found
        return copied.reasoning_content or copied.reasoning

    def turn(self, place: str) -> Turn:
        """Return the turn that the message at a place is.

        Raises:
            InvalidRequestError: Another's message than the assistant's holds a refusal.
        """
        turn = Turn(
            "system" if self.role == "developer" else self.role,
            place,
            self.tool_call_id,
            id_place=f"{place}.tool_call_id",
            tools_place=f"{place}.{'role' if self.role == 'tool' else 'tool_calls'}",
            reasoning=self.thoughts or "",
        )
        for at, part in enumerate(self.content):
            part.add_to(turn, f"{place}.content[{at}]")
        if self.refusal:
            turn.add_text(self.refusal)
        for at, call in enumerate(self.tool_calls or ()):
            function = call.function
            id_place = f"{place}.tool_calls[{at}].id"
            turn.call(call.id, function.name, function.arguments, id_place)
        return turn

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        said = self.content or self.refusal or self.reasoning_content or self.reasoning
        if not (said or self.tool_calls):
            raise _mistake("content", "A message needs content.")
        if self.tool_calls and self.role != "assistant":
            raise _mistake("tool_calls", "Only the assistant calls tools.")
        if self.refusal and self.role != "assistant":
            raise _mistake("refusal", "Only the assistant refuses.")
        if self.tool_call_id is not None and self.role != "tool":
            raise _mistake("tool_call_id", "Only a tool's message answers a call.")
        if self.tool_call_id is None and self.role == "tool":
            raise _mistake("tool_call_id", "A tool's message needs the id of the call it answers.")
        return self

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        name = "reasoning_content" if self.reasoning_content else "reasoning"
        if self.role != "assistant" and (self.reasoning_content or self.reasoning):
            raise _mistake(name, "Only the assistant's messages hold reasoning.")
        if len({self.reasoning_content, self.reasoning} - {None}) > 1:
            raise _mistake(name, "reasoning and reasoning_content differ; send one of them.")
        return self


def _mistake(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("message", "{message}", {"field": field, "message": message})


def _check_num_parts(messages: Any) -> Any:
    """Refuse too many parts before any of them is validated."""
    if not isinstance(messages, list):
        return messages
    known = [message for message in messages if isinstance(message, dict)]
    contents = [message.get("content") for message in known]
    calls = [message.get("tool_calls") for message in known]
    num_parts = len(messages) + sum(len(c) - 1 for c in contents if isinstance(c, list))
    refuse_many_parts(num_parts + sum(len(c) for c in calls if isinstance(c, list)))
    return messages


def refuse_many_parts(num_parts: int) -> None:
    """Refuse a conversation with more than `MAX_NUM_PARTS`, for a validator.

    Raises:
        PydanticCustomError: It has more.
    """
    if num_parts > MAX_NUM_PARTS:
        raise PydanticCustomError(
            "too_many_parts",
            "The messages hold {num_parts} messages, parts and calls together; at most "
            "{max_num_parts} are read. Leave out early messages, or join the parts of a message.",
            {"num_parts": num_parts, "max_num_parts": MAX_NUM_PARTS},
        )


Messages = Annotated[
    list[MessageBody], Field(min_length=1, fail_fast=True), BeforeValidator(_check_num_parts)
]


def conversation_of(messages: list[MessageBody]) -> Conversation:
    """Return the messages of a request as a conversation.

    Raises:
        InvalidRequestError: Another's message than the assistant's holds a refusal.
    """
    return Conversation([body.turn(f"messages[{at}]") for at, body in enumerate(messages)])


def _check_num_ids(token_ids: Any) -> Any:
    if isinstance(token_ids, list) and len(token_ids) > MAX_NUM_TOKEN_IDS:
        raise PydanticCustomError(
            "too_many_token_ids",
            "There are {num} token ids; at most {max} are read, more than any model takes.",
            {"num": len(token_ids), "max": MAX_NUM_TOKEN_IDS},
        )
    return token_ids


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_NUM_TOKEN_IDS}),
    BeforeValidator(_check_num_ids),
]
