"""Converts a body's messages to the replica's, and checks them, their calls and their images.

Images are fetched and checked here, before a replica sees the request; that counts towards the
request's deadline for its first token.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from serve_app.api.body.limits import check_messages
from serve_app.api.openai.prompt_schema import (
    ImagePartBody,
    MessageBody,
    PartBody,
    RefusalPartBody,
    Role,
    TextPartBody,
)
from serve_app.api.tools.schema import to_tool_calls
from serve_app.backends.models.catalog import ServedModel
from serve_app.backends.streams.deadlines import arrival_s, first_deadline
from serve_app.config import LimitsConfig
from serve_app.images.fetcher import ImageSource
from serve_app.images.images import check_image, is_data_uri, read_image


class PromptReader:
    """Reads the messages of requests.

    Args:
        limits: The bounds on messages and images, and the deadline.
        images: Fetches images at https: URLs; without it such images are refused.
    """

    def __init__(self, limits: LimitsConfig, images: ImageSource | None) -> None:
        self._limits = limits
        self._images = images

    async def read(self, bodies: list[MessageBody], model: ServedModel) -> tuple[ChatMessage, ...]:
        """Return the messages for the model's replica; see `to_messages`.

        Images at https: URLs are fetched first, if their hosts are allowed. Images are decoded from
        base64 and checked on a thread: a large one takes long, and every stream shares the event
        loop.

        Raises:
            InvalidRequestError: The messages can't be honoured.
            DeadlineExceededError: The images took longer than the first token may take.
        """
        check_messages(bodies, self._limits)
        if not model.description.accepts_tools:
            _refuse_calls(bodies, model.description.id)
        accepts_images = model.description.accepts_images
        if not _count_images(bodies):
            return to_messages(bodies, self._limits, accepts_images)
        deadline = first_deadline(self._limits, arrival_s())
        return await deadline.hold(self._read_with_images(bodies, accepts_images))

    async def _read_with_images(
        self, bodies: list[MessageBody], accepts_images: bool
    ) -> tuple[ChatMessage, ...]:
        fetched = await self._fetch(bodies) if accepts_images else {}
        return await asyncio.to_thread(to_messages, bodies, self._limits, accepts_images, fetched)

    async def _fetch(self, bodies: list[MessageBody]) -> dict[str, bytes]:
        urls = _image_urls(bodies, self._limits)
        return {} if self._images is None else await self._images.fetch_all(urls)


def to_messages(
    bodies: list[MessageBody],
    limits: LimitsConfig,
    accepts_images: bool,
    fetched: Mapping[str, bytes] | None = None,
) -> tuple[ChatMessage, ...]:
    """Return the messages for the replica, with their images checked.

    Images in the results of calls come first in the user's turn behind those results, because few
    chat templates show images elsewhere.

    Args:
        bodies: The messages in the request.
        limits: The bounds on the number and size of images.
        accepts_images: Whether the model reads images.
        fetched: The images at URLs, by URL.

    Raises:
        InvalidImageError: An image is broken or too large.
        InvalidRequestError: There are too many images, or the model reads no images; or a tool's
            message answers a call that was not made.
    """
    _check_num_images(bodies, limits)
    images = fetched or {}
    names = _called_names(bodies)
    return _with_images_of_results(
        ChatMessage(
            role="system" if body.role == "developer" else body.role,
            parts=(
                *(
                    _to_part(
                        part,
                        body.role,
                        accepts_images,
                        limits,
                        images,
                        f"messages[{m}].content[{p}]",
                    )
                    for p, part in enumerate(body.content)
                ),
                *([TextPart(body.refusal)] if body.refusal else ()),
            ),
            tool_calls=to_tool_calls(body.tool_calls or (), f"messages[{m}].tool_calls"),
            tool_call_id=body.tool_call_id,
            name=names.get(body.tool_call_id or ""),
            reasoning_content=body.thoughts,
        )
        for m, body in enumerate(bodies)
    )


def _with_images_of_results(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages with the images of results in the user's turn behind them."""
    moved: list[ChatMessage] = []
    images: list[TextPart | ImagePart] = []
    for message in messages:
        if message.role == "tool":
            images += (part for part in message.parts if isinstance(part, ImagePart))
            texts = tuple(part for part in message.parts if isinstance(part, TextPart))
            message = replace(message, parts=texts or (TextPart(""),))
        elif images and message.role == "user":
            message, images = replace(message, parts=(*images, *message.parts)), []
        elif images:
            moved.append(ChatMessage("user", tuple(images)))
            images = []
        moved.append(message)
    return (*moved, ChatMessage("user", tuple(images))) if images else tuple(moved)


def _image_urls(bodies: list[MessageBody], limits: LimitsConfig) -> dict[str, str]:
    """Return the URLs of images that must be fetched, each with its place in the request.

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


def _called_names(bodies: list[MessageBody]) -> dict[str, str]:
    """Return the names of the functions that were called, by the ids of the calls.

    Raises:
        InvalidRequestError: A message answers a call that was not made before it.
    """
    names: dict[str, str] = {}
    for m, body in enumerate(bodies):
        names |= {call.id: call.function.name for call in body.tool_calls or ()}
        if body.tool_call_id is not None and body.tool_call_id not in names:
            raise InvalidRequestError(
                "No earlier message has a call with this id.", f"messages[{m}].tool_call_id"
            )
    return names


def _refuse_calls(bodies: list[MessageBody], model_id: str) -> None:
    """Refuse calls and their results if the model's chat template would leave them out.

    Raises:
        InvalidRequestError: The messages hold a call or a result.
    """
    for m, body in enumerate(bodies):
        if body.tool_calls or body.role == "tool":
            raise InvalidRequestError(
                f"The chat template of {model_id!r} does not support tools.",
                f"messages[{m}].{'tool_calls' if body.tool_calls else 'role'}",
            )


def _count_images(bodies: list[MessageBody]) -> int:
    """Return the number of images in all messages."""
    return sum(isinstance(part, ImagePartBody) for body in bodies for part in body.content)


def _check_num_images(bodies: list[MessageBody], limits: LimitsConfig) -> None:
    num_images = _count_images(bodies)
    if num_images > limits.max_num_images:
        raise InvalidRequestError(
            f"The request holds {num_images} images; at most {limits.max_num_images} are read "
            "(limits.max_num_images).",
            "messages",
        )


def _to_part(
    part: PartBody,
    role: Role,
    accepts_images: bool,
    limits: LimitsConfig,
    fetched: Mapping[str, bytes],
    param: str,
) -> TextPart | ImagePart:
    if isinstance(part, TextPartBody):
        return TextPart(part.text)
    if isinstance(part, RefusalPartBody):
        if role != "assistant":
            raise InvalidRequestError("Only the assistant's messages hold refusals.", param)
        return TextPart(part.refusal)
    if not accepts_images:
        raise InvalidRequestError("This model does not read images.", param)
    if role not in ("user", "tool"):
        raise InvalidRequestError(
            "Images are only accepted in a user's message and in a tool's result.", param
        )
    url, param = part.image_url.url, f"{param}.image_url.url"
    if url in fetched:
        return check_image(fetched[url], limits, param)
    return read_image(url, limits, param)
