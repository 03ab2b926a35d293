"""OpenAI's older completions on the wire: the fields of requests, answers and chunks.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract.errors import InvalidRequestError
from deployments.contract.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.openai.answer_schema import PROMPT_LOGPROBS, AnswerFields, Chunk
from serve_app.api.openai.logprobs import CompletionLogprobs, PromptPositions
from serve_app.api.openai.text_schema import PROMPT_FORMS, PromptTokenIds, Text
from serve_app.api.openai.usage import Usage
from serve_app.backends.streams.choices import TrueFinish
from serve_app.config import MAX_NUM_CHOICES, LimitsConfig

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default, and vLLM's."""

MAX_NUM_PROMPTS = 4096
"""Prompts that are validated. The operator's `max_num_prompts` bounds how many of them run."""

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
    PROMPT_FORMS,
]


class CompletionRequest(AnswerFields):
    """A request to continue one text or several."""

    prompt: Prompts = Field(
        description="One text or several, or their token ids. Answers keep the prompts' order."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Most tokens of the answer. With 0 there is none: useful with echo or "
        "prompt_logprobs. More than the model's length leaves means all that it leaves, unless the "
        "server's configuration refuses that.",
    )
    echo: bool | None = Field(
        default=None,
        description="Put the prompt before the answer, and its tokens before those of logprobs.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_NUM_TOP_LOGPROBS,
        description="Return the log-probability of each token, and this many of the likeliest "
        "tokens at its position. With echo: of the prompt's tokens, too.",
    )
    best_of: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_CHOICES,
        description="Must equal n: texts are not ranked, and all are returned.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise PydanticCustomError(
                "unsupported_parameter",
                "best_of is not supported here unless it equals n: texts are not ranked. "
                "Ask for n of them and choose.",
                {"field": "best_of"},
            )
        return self

    @property
    def renamed(self) -> Mapping[str, str]:
        """The field that an error about the log-probabilities of prompts names."""
        return {"prompt_logprobs": self.prompt_logprobs_param}

    def to_prompts(self, limits: LimitsConfig) -> list[str | tuple[int, ...]]:
        """Return the prompts.

        Raises:
            InvalidRequestError: They need too many answers.
        """
        most = limits.max_num_prompts
        if self.num_answers > most:
            raise InvalidRequestError(
                f"The prompts, each n times, need {self.num_answers} answers; one request may have "
                f"at most {most} (limits.max_num_prompts). Send several requests.",
                "prompt",
            )
        return self.prompts

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return len(self.prompts) * self.num_choices

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
        """How many of the likeliest tokens to return at each position; None: no logprobs."""
        return self.logprobs

    @property
    def num_echoed_logprobs(self) -> int | None:
        """How many of the likeliest tokens to return at each position of a repeated prompt."""
        return self.logprobs if self.echo else None

    @property
    def num_prompt_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to compute at each position of the prompt."""
        wanted = (self.prompt_logprobs, self.num_echoed_logprobs)
        return max((number for number in wanted if number is not None), default=None)

    @property
    def prompt_logprobs_param(self) -> str:
        """The name of the field that `num_prompt_logprobs_wanted` comes from."""
        is_echoed = self.num_prompt_logprobs_wanted != self.prompt_logprobs
        return "logprobs" if is_echoed else "prompt_logprobs"

    @property
    def default_max_tokens(self) -> int | None:
        """Most tokens of the answer if the request sets no limit."""
        return DEFAULT_MAX_TOKENS


def _token_ids(prompt: Any) -> tuple[int, ...]:
    return tuple(prompt)


class CompletionChoice(BaseModel):
    """One of the answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: TrueFinish
    prompt_logprobs: PromptPositions | None = Field(
        default=None, exclude_if=lambda positions: positions is None, description=PROMPT_LOGPROBS
    )


class Completion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage

    @property
    def text(self) -> str:
        """The first continuation."""
        return self.choices[0].text


class CompletionChunkChoice(BaseModel):
    """What a chunk adds to one of the answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TrueFinish | None


class CompletionChunk(Chunk):
    """One chunk of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
