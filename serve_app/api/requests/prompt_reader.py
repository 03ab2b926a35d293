"""Makes the contract's messages of a request's turns; checks the turns, their calls and images.

Images are fetched and checked here, before a replica sees the request; that counts towards the
request's deadline for its first token.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from serve_app.api.body.limits import Prompt, check_messages
from serve_app.api.conversation import Conversation, GivenImage, Role, Turn
from serve_app.backends.models.catalog import ServedModel
from serve_app.backends.streams.deadlines import arrival_s, first_deadline
from serve_app.config import LimitsConfig
from serve_app.images.fetcher import ImageSource
from serve_app.images.images import check_image, is_data_uri, read_image


class PromptReader:
    """Reads the prompts of requests.

    Args:
        limits: The bounds on messages and images, and the deadline.
        images: Fetches images at https: URLs; without it such images are refused.
    """

    def __init__(self, limits: LimitsConfig, images: ImageSource | None) -> None:
        self._limits = limits
        self._images = images

    async def read(self, given: Conversation | Prompt, model: ServedModel) -> Prompt:
        """Return a prompt for the model's replica; see `to_messages`.

        Images at https: URLs are fetched first, if their hosts are allowed. Images are decoded from
        base64 and checked on a thread: a large one takes long, and every stream shares the event
        loop.

        Raises:
            InvalidRequestError: The messages can't be honoured.
            DeadlineExceededError: The images took longer than the first token may take.
        """
        if not isinstance(given, Conversation):
            return given
        turns = given.turns
        check_messages(turns, self._limits)
        if not model.description.accepts_tools:
            _refuse_calls(turns, model.description.id)
        accepts_images = model.description.accepts_images
        images = [part for turn in turns for part in turn.parts if isinstance(part, GivenImage)]
        if not images:
            return to_messages(turns, self._limits, accepts_images)
        _check_num_images(len(images), self._limits)
        deadline = first_deadline(self._limits, arrival_s())
        return await deadline.hold(self._read_with_images(turns, images, accepts_images))

    async def _read_with_images(
        self, turns: Sequence[Turn], images: Iterable[GivenImage], accepts_images: bool
    ) -> tuple[ChatMessage, ...]:
        fetched: Mapping[str, bytes] = {}
        if accepts_images and self._images is not None:
            urls = {each.url: each.url_place for each in images if not is_data_uri(each.url)}
            fetched = await self._images.fetch_all(urls)
        return await asyncio.to_thread(to_messages, turns, self._limits, accepts_images, fetched)


def to_messages(
    turns: Sequence[Turn],
    limits: LimitsConfig,
    accepts_images: bool,
    fetched: Mapping[str, bytes] | None = None,
) -> tuple[ChatMessage, ...]:
    """Return the messages for the replica, with their images checked.

    Images in the results of calls come first in the user's turn behind those results, because few
    chat templates show images elsewhere. A turn that holds nothing becomes an empty text.

    Args:
        turns: The turns in the request.
        limits: The bounds on the size of images.
        accepts_images: Whether the model reads images.
        fetched: The images at URLs, by URL.

    Raises:
        InvalidImageError: An image is broken or too large.
        InvalidRequestError: The model reads no images; or a tool's message answers a call that was
            not made, or two calls have the same id.
    """
    images = fetched or {}
    names = _called_names(turns)
    return _with_images_of_results(
        ChatMessage(
            turn.role,
            tuple(_to_part(part, turn.role, accepts_images, limits, images) for part in turn.parts)
            or (() if turn.calls or turn.reasoning else (TextPart(""),)),
            tuple(call for call, _ in turn.calls),
            turn.tool_call_id,
            names.get(turn.tool_call_id or ""),
            turn.reasoning or None,
        )
        for turn in turns
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


def _called_names(turns: Iterable[Turn]) -> dict[str, str]:
    """Return the names of the functions that were called, by the ids of the calls.

    Raises:
        InvalidRequestError: Two calls of one turn have the same id, or a turn answers a call that
            was not made before it.
    """
    names: dict[str, str] = {}
    for turn in turns:
        ids: set[str] = set()
        for call, place in turn.calls:
            if call.id in ids:
                raise InvalidRequestError("Two calls of one message have this id.", place)
            ids.add(call.id)
            names[call.id] = call.name
        if turn.tool_call_id is not None and turn.tool_call_id not in names:
            raise InvalidRequestError("No earlier message has a call with this id.", turn.id_place)
    return names


def _refuse_calls(turns: Iterable[Turn], model_id: str) -> None:
    """Refuse calls and their results if the model's chat template would leave them out.

    Raises:
        InvalidRequestError: The turns hold a call or a result.
    """
    for turn in turns:
        if turn.calls or turn.role == "tool":
            raise InvalidRequestError(
                f"The chat template of {model_id!r} does not support tools.",
                turn.tools_place or turn.place,
            )


def _check_num_images(num_images: int, limits: LimitsConfig) -> None:
    if num_images > limits.max_num_images:
        raise InvalidRequestError(
            f"The request holds {num_images} images; at most {limits.max_num_images} are read "
            "(limits.max_num_images).",
            "messages",
        )


def _to_part(
    part: TextPart | GivenImage,
    role: Role,
    accepts_images: bool,
    limits: LimitsConfig,
    fetched: Mapping[str, bytes],
) -> TextPart | ImagePart:
    if isinstance(part, TextPart):
        return part
    if not accepts_images:
        raise InvalidRequestError("This model does not read images.", part.place)
    if role not in ("user", "tool"):
        raise InvalidRequestError(
            "Images are only accepted in a user's message and in a tool's result.", part.place
        )
    if part.url in fetched:
        return check_image(fetched[part.url], limits, part.url_place)
    return read_image(part.url, limits, part.url_place)
