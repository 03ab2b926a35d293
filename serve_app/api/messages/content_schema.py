"""The content of Anthropic's messages on the wire: turns, and the blocks that they hold.

Source: https://docs.claude.com/en/api/messages
"""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.body.cache_control import CacheControl
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.conversation import Conversation, Turn
from serve_app.api.messages.signature import carried
from serve_app.api.openai.prompt_schema import refuse_many_parts
from serve_app.api.tools.schema import MAX_CALL_ID_LENGTH, FunctionName
from serve_app.images.images import media_type_of

CallId = Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_LENGTH)]


class TextBlock(StrictBody):
    """A block that is text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    parsed_output: Any = Field(
        default=None,
        description="Accepted, but not read: what the anthropic package has read from the text.",
    )

    echoed: ClassVar[frozenset[str]] = frozenset({"citations"})

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the text to a turn."""
        turn.add_text(self.text)


class Base64Source(StrictBody):
    """An image's data, of the type that it names."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @model_validator(mode="after")
    def _check_media_type(self) -> Self:
        """Refuse an image of another type, as Anthropic's server does."""
        found = media_type_of(self.data)
        if found not in (None, self.media_type):
            raise PydanticCustomError(
                "media_type_mismatch",
                "The image was specified using the {named} media type, but the image appears to "
                "be a {found} image.",
                {"named": self.media_type, "found": found, "field": "media_type"},
            )
        return self

    @property
    def address(self) -> str:
        """The image as a `data:` URI."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(StrictBody):
    """An image's address."""

    type: Literal["url"]
    url: str = Field(
        description="An https: URL, if the server's configuration lists its host; or a data: URI."
    )

    @property
    def address(self) -> str:
        """The image's URL."""
        return self.url


class ImageBlock(StrictBody):
    """A block that is an image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl = None

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the image to a turn."""
        turn.add_image(self.source.address, place, "source")


class ThinkingBlock(StrictBody):
    """The assistant's reasoning, as an answer reported it."""

    type: Literal["thinking"]
    thinking: str = Field(description="The chat template decides what the model sees of it.")
    signature: str | None = Field(
        default=None,
        description="Read only where it carries the reasoning of a block without any, which "
        "thinking.display omitted.",
    )

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the reasoning to a turn."""
        turn.reasoning += self.thinking or carried(self.signature)


class ToolUseBlock(StrictBody):
    """A call that the assistant has made, as an answer reported it."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl = None

    def add_to(self, turn: Turn, place: str) -> None:
        """Append the call to a turn."""
        turn.call(self.id, self.name, json.dumps(self.input, ensure_ascii=False), place)


def _blocks(content: Any) -> Any:
    if not isinstance(content, str | list):
        raise wrong_type("a string or a list of blocks")
    if isinstance(content, list):
        refuse_many_parts(len(content))
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _result_blocks(content: Any) -> Any:
    return [] if content is None else _blocks(content)


# Lists are validated up to the first error: all errors of a large body would fill the memory.
Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock]),
]


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(StrictBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: Annotated[
        list[ResultBlock],
        Field(fail_fast=True),
        BeforeValidator(_result_blocks, json_schema_input_type=str | list[ResultBlock] | None),
    ] = Field(default=[], description="Text and images, which the model sees behind the results.")
    is_error: bool | None = Field(
        default=None, description="Accepted, but the model only sees the content."
    )
    cache_control: CacheControl = None

    def add_result(self, conversation: Conversation, place: str) -> None:
        """Append the result as a turn of its own."""
        turn = conversation.result(self.tool_use_id, place, "tool_use_id")
        for at, block in enumerate(self.content):
            block.add_to(turn, f"{place}.content[{at}]")


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(StrictBody):
    """A turn of the user, with the results of calls."""

    role: Literal["user"]
    content: Annotated[
        list[UserBlock],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(
            _blocks,
            json_schema_input_type=str | Annotated[list[UserBlock], Field(min_length=1)],
        ),
    ]

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the turn: each result by itself, and what stands between them."""
        for at, block in enumerate(self.content):
            where = f"{place}.content[{at}]"
            if isinstance(block, ToolResultBlock):
                block.add_result(conversation, where)
            else:
                block.add_to(conversation.turn("user", place), where)


class AssistantMessage(StrictBody):
    """A turn of the assistant."""

    role: Literal["assistant"]
    content: Annotated[
        list[AssistantBlock],
        Field(fail_fast=True),
        BeforeValidator(_blocks, json_schema_input_type=str | list[AssistantBlock]),
    ]

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the turn."""
        turn = conversation.turn("assistant", place)
        for at, block in enumerate(self.content):
            block.add_to(turn, f"{place}.content[{at}]")


class SystemMessage(StrictBody):
    """Instructions between the turns; the user's, if the chat template allows none there."""

    role: Literal["system"]
    content: Texts

    def add_to(self, conversation: Conversation, place: str) -> None:
        """Append the instructions."""
        add_system(self.content, conversation, f"{place}.content", place)


def add_system(blocks: list[TextBlock], conversation: Conversation, where: str, place: str) -> None:
    """Append instructions, if there are any."""
    for at, block in enumerate(blocks):
        block.add_to(conversation.turn("system", place), f"{where}[{at}]")


def _count_blocks(messages: Any) -> Any:
    """Refuse too many blocks before any of them is validated."""
    if isinstance(messages, list):
        refuse_many_parts(sum(map(_num_blocks, messages)))
    return messages


def _num_blocks(holder: Any) -> int:
    """Return the number of blocks in a message or a block, itself included."""
    content = holder.get("content") if isinstance(holder, dict) else None
    if not isinstance(content, list):
        return 1
    nested = (each.get("content") for each in content if isinstance(each, dict))
    return 1 + len(content) + sum(len(each) for each in nested if isinstance(each, list))


MessageTurns = Annotated[
    list[Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_count_blocks),
]
