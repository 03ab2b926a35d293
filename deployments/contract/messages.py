"""A conversation as the contract has it: messages, their parts, tools and calls."""

from dataclasses import dataclass, field
from typing import Final, Literal

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that Pillow may open; it knows more, and some of them start other programs."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a message that is text; its `repr` hides the text from logs."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An encoded image of one of the `IMAGE_FORMATS`, in a message."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: The function's name, of letters, digits, `_` and `-`.
        description: What the function does; None leaves it out of the prompt.
        parameters: The JSON schema of the function's arguments, as a JSON string.
    """

    name: str
    description: str | None = field(repr=False)
    parameters: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the assistant.

    Attributes:
        id: The call's id, which the tool's message refers to.
        name: The function's name.
        arguments: JSON, as a string: an object, or one string that holds the broken arguments of a
            call that was cut.
    """

    id: str
    name: str
    arguments: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: Whose turn it is; a tool's turn holds the result of one call.
        parts: The content; empty if the assistant only calls tools.
        tool_calls: The assistant's calls.
        tool_call_id: The call that a tool's turn answers; None for other roles.
        name: The function whose result a tool's turn holds; None for other roles.
        reasoning_content: The assistant's reasoning in an earlier turn. The chat template decides
            what the model sees of it.
    """

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = field(default=None, repr=False)


TemplateValue = str | int | float | bool | None
"""A value that a request may give to a parameter of the chat template."""


TemplatePairs = tuple[tuple[str, TemplateValue], ...]
"""Such values, each with the parameter's name."""
