"""Texts that clients send to be continued, embedded, classified or compared; their tokens."""

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from serve_app.api.body.priority import Priority
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.openai.prompt_schema import TokenIds
from serve_app.config import MAX_NUM_TEXTS

Text = Annotated[str, Field(min_length=1)]
PromptTokenIds = Annotated[TokenIds, Field(min_length=1)]
NumTokens = Annotated[int, Field(ge=1, le=2**31 - 1)]

TruncatePromptTokens = Annotated[
    Literal[-1] | NumTokens | None,
    Field(
        description="Most tokens of a text that the model reads, special ones included; the rest "
        "is dropped. -1: as many as the model can read. Null: a text longer than that is refused."
    ),
]


def _kind(texts: Any) -> str | None:
    """Return the form of texts, so that errors only concern that form."""
    return "text" if isinstance(texts, str) else "texts" if isinstance(texts, list) else None


TextOrTexts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[Text], Tag("texts"), Field(min_length=1, max_length=MAX_NUM_TEXTS, fail_fast=True)
    ],
    Discriminator(
        _kind,
        custom_error_type="wrong_type",
        custom_error_message="must be {expected}",
        custom_error_context={"expected": "a string or a list of strings"},
    ),
]


def _form(prompt: Any) -> str | None:
    """Return a prompt's form by its first entry: validating all entries four ways takes long."""
    match prompt:
        case str():
            return "text"
        case [str(), *_]:
            return "texts"
        case [list(), *_]:
            return "lists"
        case list():
            return "token_ids"
        case _:
            return None


PROMPT_FORMS: Final = Discriminator(
    _form,
    custom_error_type="wrong_type",
    custom_error_message="must be {expected}",
    custom_error_context={
        "expected": "a string, a list of strings, token ids, or a list of lists of token ids"
    },
)
"""Chooses among the tags text, texts, token_ids and lists."""


class CutTextsBody(StrictBody):
    """Texts that are read whole, or without their ends."""

    truncate: bool | None = Field(
        default=None,
        description="Drop the end of a text that has more tokens than the model reads. Without it, "
        "such a text is refused.",
    )
    truncate_prompt_tokens: TruncatePromptTokens = None
    priority: Priority = None
    user: str | None = Field(default=None, description="Accepted, but neither kept nor read.")
    request_id: str | None = Field(
        default=None, description="Accepted, but not read: send X-Request-Id instead."
    )

    at_most_one: ClassVar[tuple[str, ...]] = ("truncate", "truncate_prompt_tokens")

    @property
    def drops_ends(self) -> bool:
        """Whether a text that is too long is read without its end, and not refused."""
        return bool(self.truncate) or self.truncate_prompt_tokens is not None

    @property
    def max_num_tokens(self) -> int | None:
        """Most tokens to keep of a text; None keeps as many as the model reads."""
        return max_num_tokens_of(self.truncate_prompt_tokens)


class TextUsage(BaseModel):
    """Tokens that the model has read, counted by the replica."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> "TextUsage":
        """Return the usage of texts with this many tokens."""
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


def max_num_tokens_of(truncate_prompt_tokens: int | None) -> int | None:
    """Return the most tokens to keep of a text; None keeps as many as the model reads."""
    return None if truncate_prompt_tokens == -1 else truncate_prompt_tokens
