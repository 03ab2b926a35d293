"""OpenAI's older completions on the wire: a text is continued as it stands.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from deployments.engine.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.answer_schema import AnswerFields
from serve_app.api.completion_logprobs import CompletionLogprobs
from serve_app.api.token_ids import TokenIds
from serve_app.api.usage import Usage
from serve_app.config import MAX_NUM_CHOICES
from serve_app.generation import TrueFinish

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and vLLM's."""

MAX_NUM_PROMPTS = 4096
"""Prompts that are looked at; how many may run is `max_num_prompts`, which is the operator's."""

Text = Annotated[str, Field(min_length=1)]
PromptTokenIds = Annotated[TokenIds, Field(min_length=1)]


def _kind(prompt: Any) -> str | None:
    """Return how a prompt is written, by its first entry: reading all in four ways takes long."""
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


Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[
        list[Text], Tag("texts"), Field(min_length=1, max_length=MAX_NUM_PROMPTS, fail_fast=True)
    ]
    | Annotated[PromptTokenIds, Tag("token_ids")]
    | Annotated[
        list[PromptTokenIds],
        Tag("lists"),
        Field(min_length=1, max_length=MAX_NUM_PROMPTS, fail_fast=True),
    ],
    Discriminator(
        _kind,
        custom_error_type="prompt",
        custom_error_message="A prompt is a string, a list of strings, token ids, or a list of "
        "lists of token ids.",
    ),
]


class CompletionRequest(AnswerFields):
    """A request to continue one text or several."""

    prompt: Prompts = Field(
        description="A text, several, or their token ids. Answers to the first come first."
    )
    echo: bool | None = Field(
        default=None,
        description="Put the prompt before the answer. Not with logprobs: the prompt has none.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_NUM_TOP_LOGPROBS,
        description="Tell how likely each token was, and so many of the likeliest at its place.",
    )
    best_of: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_CHOICES,
        description="Must be n: texts are not ranked, all are answered.",
    )

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AnswerFields.unsupported,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }

    excludes: ClassVar[Mapping[str, str]] = {"echo": "logprobs"}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise PydanticCustomError(
                "unsupported_parameter",
                "best_of is not supported here unless it equals n: texts are not ranked; "
                "ask for n of them and choose.",
                {"field": "best_of"},
            )
        return self

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt, as a text or as token ids."""
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [_token_ids(self.prompt)]
            case _:
                return [p if isinstance(p, str) else _token_ids(p) for p in self.prompt]

    @property
    def num_logprobs_wanted(self) -> int | None:
        """How many likely tokens to tell at each place; None tells nothing."""
        return self.logprobs

    @property
    def default_max_tokens(self) -> int | None:
        """Most tokens of the answer where the request names none."""
        return DEFAULT_MAX_TOKENS


def _token_ids(prompt: Any) -> tuple[int, ...]:
    return tuple(prompt)


class CompletionChoice(BaseModel):
    """One of the answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: TrueFinish


class Completion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage
