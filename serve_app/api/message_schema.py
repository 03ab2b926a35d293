"""Messages as OpenAI's clients send them, and what becomes of them.

Text parts and image parts, images as `data:` URIs in a user's message alone.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.contract import ChatMessage, ImagePart, TextPart
from deployments.errors import InvalidRequestError
from serve_app.api.strict_body import StrictBody
from serve_app.config import LimitsConfig
from serve_app.images import read_image

Role = Literal["system", "developer", "user", "assistant"]

MAX_NUM_PARTS = 4096
"""Parts of all messages together: a body has room for a million, and seconds would go to them."""


class TextPartBody(StrictBody):
    """A piece of text."""

    type: Literal["text"]
    text: str


class ImageUrlBody(StrictBody):
    """Where an image stands."""

    url: str = Field(description="A data: URI with base64: PNG, JPEG, WebP or GIF.")

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"detail": ("auto",)}


class ImagePartBody(StrictBody):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrlBody


PartBody = Annotated[TextPartBody | ImagePartBody, Field(discriminator="type")]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class MessageBody(StrictBody):
    """One turn of a conversation."""

    role: Role = Field(description="developer means system.")
    # Each list is read up to its first mistake: the errors of a large body would fill the memory.
    content: Annotated[
        list[PartBody],
        BeforeValidator(
            _as_parts, json_schema_input_type=str | Annotated[list[PartBody], Field(min_length=1)]
        ),
    ] = Field(min_length=1, fail_fast=True)
    name: str | None = Field(default=None, description="Bookkeeping: the model does not see it.")

    # What OpenAI's client sends back when an answer becomes part of the next request.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning_content": ("",),
        "refusal": ("",),
        "tool_call_id": (),
        "tool_calls": ([],),
    }


def _bounded(messages: Any) -> Any:
    """Refuse too many parts before any of them is looked at."""
    if not isinstance(messages, list):
        return messages
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = len(messages) + sum(len(c) - 1 for c in contents if isinstance(c, list))
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


def to_messages(
    bodies: list[MessageBody], limits: LimitsConfig, accepts_images: bool
) -> tuple[ChatMessage, ...]:
    """Return the messages for the replica, their images checked.

    Raises:
        InvalidImageError: An image is broken or too large.
        InvalidRequestError: There are too many images, or they stand where none can be read.
    """
    num_images = count_images(bodies)
    if num_images > limits.max_num_images:
        raise InvalidRequestError(
            f"The request holds {num_images} images; at most {limits.max_num_images} are read.",
            "messages",
        )
    return tuple(
        ChatMessage(
            role="system" if body.role == "developer" else body.role,
            parts=tuple(
                _to_part(part, body.role, accepts_images, limits, f"messages[{m}].content[{p}]")
                for p, part in enumerate(body.content)
            ),
        )
        for m, body in enumerate(bodies)
    )


def count_images(bodies: list[MessageBody]) -> int:
    """Return the number of images in all messages."""
    return sum(isinstance(part, ImagePartBody) for body in bodies for part in body.content)


def _to_part(
    part: TextPartBody | ImagePartBody,
    role: Role,
    accepts_images: bool,
    limits: LimitsConfig,
    param: str,
) -> TextPart | ImagePart:
    if isinstance(part, TextPartBody):
        return TextPart(part.text)
    if not accepts_images:
        raise InvalidRequestError("This model reads no images.", param)
    if role != "user":
        raise InvalidRequestError("Images may stand in a user's message alone.", param)
    return read_image(part.image_url.url, limits.max_image_pixels, f"{param}.image_url.url")
