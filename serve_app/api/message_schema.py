"""Messages as OpenAI's clients send them, and what becomes of them.

Text parts, and image parts in a user's message alone; the assistant's calls of tools, and what they
have returned.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract import ChatMessage, ImagePart, TextPart
from deployments.errors import InvalidRequestError
from serve_app.api.strict_body import StrictBody
from serve_app.api.tool_schema import MAX_CALL_ID_LENGTH, ToolCallBody, to_tool_calls
from serve_app.config import LimitsConfig
from serve_app.images import check_image, is_data_uri, read_image

Role = Literal["system", "developer", "user", "assistant", "tool"]

MAX_NUM_PARTS = 4096
"""Parts and calls of all messages: a body has room for a million, and seconds would go to them."""


class TextPartBody(StrictBody):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageUrlBody(StrictBody):
    """Where an image stands."""

    url: str = Field(
        description="A data: URI with base64: PNG, JPEG, WebP or GIF. An https: URL where the "
        "server lists its host."
    )

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"detail": ("auto",)}


class ImagePartBody(StrictBody):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrlBody


_RULES: Final[dict[str, Any]] = {
    "allOf": [
        {
            "anyOf": [
                {"properties": {name: {"not": {"enum": [None, []]}}}, "required": [name]}
                for name in ("content", "tool_calls")
            ]
        },
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
"""What `MessageBody._check_role` holds, as a JSON schema."""

PartBody = Annotated[TextPartBody | ImagePartBody, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    if content is None:
        return []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class MessageBody(StrictBody):
    """One turn of a conversation."""

    model_config = ConfigDict(json_schema_extra=_RULES)

    role: Role = Field(description="developer means system; tool is what a call has returned.")
    # Each list is read up to its first mistake: the errors of a large body would fill the memory.
    content: Annotated[
        list[PartBody],
        BeforeValidator(_as_parts, json_schema_input_type=str | list[PartBody] | None),
    ] = Field(
        default=[], fail_fast=True, description="Null only where the assistant has called tools."
    )
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = Field(
        default=None, description="Of the assistant's messages: what it has called."
    )
    tool_call_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_CALL_ID_LENGTH,
        description="Of a tool's messages: the call that it answers.",
    )
    name: str | None = Field(default=None, description="Bookkeeping: the model does not see it.")

    # What OpenAI's client sends back when an answer becomes part of the next request.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning_content": ("",),
        "refusal": ("",),
    }

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if not self.content and not self.tool_calls:
            raise _mistake("content", "A message needs content.")
        if self.tool_calls and self.role != "assistant":
            raise _mistake("tool_calls", "Only the assistant calls tools.")
        if self.tool_call_id is not None and self.role != "tool":
            raise _mistake("tool_call_id", "Only a tool's message answers a call.")
        if self.tool_call_id is None and self.role == "tool":
            raise _mistake("tool_call_id", "A tool's message needs the id of the call it answers.")
        return self


def _mistake(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("message", "{message}", {"field": field, "message": message})


def _bounded(messages: Any) -> Any:
    """Refuse too many parts before any of them is looked at."""
    if not isinstance(messages, list):
        return messages
    known = [message for message in messages if isinstance(message, dict)]
    contents = [message.get("content") for message in known]
    calls = [message.get("tool_calls") for message in known]
    num_parts = len(messages) + sum(len(c) - 1 for c in contents if isinstance(c, list))
    num_parts += sum(len(c) for c in calls if isinstance(c, list))
    if num_parts > MAX_NUM_PARTS:
        raise PydanticCustomError(
            "too_many_parts",
            "The messages hold {num_parts} parts; at most {max_num_parts} are read.",
            {"num_parts": num_parts, "max_num_parts": MAX_NUM_PARTS},
        )
    return messages


Messages = Annotated[
    list[MessageBody], Field(min_length=1, fail_fast=True), BeforeValidator(_bounded)
]


def image_urls(bodies: list[MessageBody], limits: LimitsConfig) -> dict[str, str]:
    """Return the URLs of images that don't bring themselves, each with its place in the request.

    Raises:
        InvalidRequestError: There are too many images.
    """
    _check_num_images(bodies, limits)
    return {
        part.image_url.url: f"messages[{m}].content[{p}].image_url.url"
        for m, body in enumerate(bodies)
        for p, part in enumerate(body.content)
        if isinstance(part, ImagePartBody) and not is_data_uri(part.image_url.url)
    }


def to_messages(
    bodies: list[MessageBody],
    limits: LimitsConfig,
    accepts_images: bool,
    fetched: Mapping[str, bytes] | None = None,
) -> tuple[ChatMessage, ...]:
    """Return the messages for the replica, their images checked.

    Args:
        bodies: The messages as they came.
        limits: The most images, and the largest.
        accepts_images: Whether the model reads images.
        fetched: The images behind `image_urls`.

    Raises:
        InvalidImageError: An image is broken or too large.
        InvalidRequestError: There are too many images, or they stand where none can be read; or
            calls and what they returned don't belong together.
    """
    _check_num_images(bodies, limits)
    images = fetched or {}
    names = called_names(bodies)
    return tuple(
        ChatMessage(
            role="system" if body.role == "developer" else body.role,
            parts=tuple(
                _to_part(
                    part, body.role, accepts_images, limits, images, f"messages[{m}].content[{p}]"
                )
                for p, part in enumerate(body.content)
            ),
            tool_calls=to_tool_calls(body.tool_calls or (), f"messages[{m}].tool_calls"),
            tool_call_id=body.tool_call_id,
            name=names.get(body.tool_call_id or ""),
        )
        for m, body in enumerate(bodies)
    )


def called_names(bodies: list[MessageBody]) -> dict[str, str]:
    """Return the functions that were called, by the ids of the calls.

    Raises:
        InvalidRequestError: A message answers a call that was not made before it.
    """
    names: dict[str, str] = {}
    for m, body in enumerate(bodies):
        names |= {call.id: call.function.name for call in body.tool_calls or ()}
        if body.tool_call_id is not None and body.tool_call_id not in names:
            raise InvalidRequestError(
                "No message before this one has a call with this id.", f"messages[{m}].tool_call_id"
            )
    return names


def refuse_calls(bodies: list[MessageBody], model_id: str) -> None:
    """Refuse calls and what they returned, for a model whose template would leave them out.

    Raises:
        InvalidRequestError: There are some.
    """
    for m, body in enumerate(bodies):
        if body.tool_calls or body.role == "tool":
            raise InvalidRequestError(
                f"The chat template of {model_id!r} knows no tools.",
                f"messages[{m}].{'tool_calls' if body.tool_calls else 'role'}",
            )


def count_images(bodies: list[MessageBody]) -> int:
    """Return the number of images in all messages."""
    return sum(isinstance(part, ImagePartBody) for body in bodies for part in body.content)


def _check_num_images(bodies: list[MessageBody], limits: LimitsConfig) -> None:
    num_images = count_images(bodies)
    if num_images > limits.max_num_images:
        raise InvalidRequestError(
            f"The request holds {num_images} images; at most {limits.max_num_images} are read "
            "(limits.max_num_images).",
            "messages",
        )


def _to_part(
    part: TextPartBody | ImagePartBody,
    role: Role,
    accepts_images: bool,
    limits: LimitsConfig,
    fetched: Mapping[str, bytes],
    param: str,
) -> TextPart | ImagePart:
    if isinstance(part, TextPartBody):
        return TextPart(part.text)
    if not accepts_images:
        raise InvalidRequestError("This model reads no images.", param)
    if role != "user":
        raise InvalidRequestError("Images may stand in a user's message alone.", param)
    url, param = part.image_url.url, f"{param}.image_url.url"
    if url in fetched:
        return check_image(fetched[url], None, limits, param)
    return read_image(url, limits, param)
