"""Messages as OpenAI's clients send them, and what becomes of them.

Text parts and image parts, images as `data:` URIs in a user's message alone.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deployments.contract import ChatMessage, ImagePart, TextPart
from deployments.errors import InvalidRequestError
from serve_app.api.strict_body import StrictBody
from serve_app.config import LimitsConfig
from serve_app.images import read_image

Role = Literal["system", "developer", "user", "assistant"]


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
    content: Annotated[
        list[PartBody], BeforeValidator(_as_parts, json_schema_input_type=str | list[PartBody])
    ] = Field(min_length=1)
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


def to_messages(
    bodies: list[MessageBody], limits: LimitsConfig, accepts_images: bool
) -> tuple[ChatMessage, ...]:
    """Return the messages for the replica, their images checked.

    Raises:
        InvalidImageError: An image is broken or too large.
        InvalidRequestError: There are too many images, or they stand where none can be read.
    """
    _check_num_images(bodies, limits.max_num_images)
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


def _check_num_images(bodies: list[MessageBody], max_num_images: int) -> None:
    parts = [part for body in bodies for part in body.content]
    num_images = sum(isinstance(part, ImagePartBody) for part in parts)
    if num_images > max_num_images:
        raise InvalidRequestError(
            f"The request holds {num_images} images; at most {max_num_images} are read.", "messages"
        )


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
