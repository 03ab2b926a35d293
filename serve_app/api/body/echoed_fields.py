"""Fields that clients copy from an answer into their next request.

Client libraries send an answer's whole object back: with fields of other servers, most of them
null. Such a field is let through where it carries nothing. Where it carries something, it is
refused by name, because the model would not see it.

The names are those of the messages, parts and calls of OpenAI's SDK, of litellm, and of servers
whose answers these clients also read (OpenRouter, Gemini).
"""

from typing import Any, Final, Literal

from pydantic import RootModel

IN_MESSAGES: Final = frozenset(
    {
        "annotations",
        "audio",
        "citations",
        "extra_content",
        "function_call",
        "images",
        "reasoning_details",
        "reasoning_items",
        "thinking_blocks",
    }
)
IN_PARTS: Final = frozenset({"annotations", "citations", "logprobs", "provider_specific_fields"})
IN_CALLS: Final = frozenset(
    {"caller", "custom", "extra_content", "provider_specific_fields", "thought_signature"}
)


class Nothing(RootModel[None | Literal[""] | list["Nothing"] | dict[str, "Nothing"]]):
    """Null, an empty text, or a list or an object that holds only such values."""


def carries_nothing(value: Any) -> bool:
    """Return whether a value is `Nothing`; faster than pydantic, and nothing is built.

    A body has room for two million nulls, and every stream waits meanwhile. So no function is
    called for them, but only for objects and lists, which `json_route` bounds.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return all(carries_nothing(each) for each in value if each is not None and each != "")
    return value is None or value == ""
