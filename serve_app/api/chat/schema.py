"""OpenAI's chat completions on the wire: the fields of requests, answers and chunks.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract.descriptions import ModelDescription
from deployments.contract.messages import TemplatePairs
from deployments.contract.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.answers.reader import AnswerFinish
from serve_app.api.conversation import Conversation
from serve_app.api.openai.answer_schema import PROMPT_LOGPROBS, AnswerFields, Chunk
from serve_app.api.openai.logprobs import ChoiceLogprobs, PromptPositions
from serve_app.api.openai.prompt_schema import Messages, conversation_of
from serve_app.api.openai.template_schema import (
    TEMPLATE_KWARGS_DESCRIPTION,
    ReasoningEffort,
    TemplateKwargs,
    effort_kwargs,
)
from serve_app.api.openai.usage import Usage
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.schema import (
    AnswerToolCall,
    ToolChoiceField,
    Tools,
    chosen,
    placed,
    to_offer,
)
from serve_app.config import LimitsConfig


class ChatRequest(AnswerFields):
    """A request for the next message of a conversation."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(
        default=None, description="Return the log-probability of each token of the answer."
    )
    top_logprobs: int | None = Field(
        default=None,
        description="With logprobs: also return this many of the likeliest tokens at each "
        "position.",
        json_schema_extra={"minimum": 0, "maximum": MAX_NUM_TOP_LOGPROBS},
    )

    tools: Tools | None = Field(default=None, description="The functions that the model may call.")
    tool_choice: ToolChoiceField | None = Field(
        default=None,
        description="Whether the model must call a function, and which. Only with tools.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: an answer ends with its first call."
    )

    chat_template_kwargs: TemplateKwargs = Field(
        default=None, description=TEMPLATE_KWARGS_DESCRIPTION
    )
    reasoning_effort: ReasoningEffort | None = Field(
        default=None,
        description="Given to the model's chat template, if it reads it. Where the template can "
        "only switch reasoning on and off (enable_thinking), none means off. A template that has "
        "neither ignores it, and the header X-Raystream-Warning says so.",
    )
    include_reasoning: bool | None = Field(
        default=None,
        description="False leaves reasoning_content, and its tokens' logprobs, out of the answer.",
    )

    # Bookkeeping: accepted, but no answer depends on it.
    metadata: dict[str, Any] | None = Field(
        default=None, description="Accepted, but neither kept nor read."
    )
    safety_identifier: str | None = Field(
        default=None, description="Accepted, but neither kept nor read."
    )
    prompt_cache_key: str | None = Field(
        default=None,
        description="Accepted, but not read: prompts with a common beginning are found without it.",
    )

    needs: ClassVar[Mapping[str, str]] = {**AnswerFields.needs, "top_logprobs": "logprobs"}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError(
                "max_tokens",
                "max_tokens and max_completion_tokens differ; send one of them.",
                {"field": "max_tokens"},
            )
        return self

    separates_reasoning: ClassVar[bool] = True

    @property
    def shows_reasoning(self) -> bool:
        """Whether the client gets the reasoning."""
        return self.include_reasoning is not False

    def to_prompts(self, limits: LimitsConfig) -> Sequence[Conversation]:
        """Return the conversation."""
        return (conversation_of(self.messages),)

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return the functions that the model may call; see `tools.schema.to_offer`."""
        choice = chosen(self.tool_choice, self.parallel_tool_calls)
        return to_offer(placed(self.tools), choice, limits, model)

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template, those of `reasoning_effort` included."""
        wanted = effort_kwargs(self.reasoning_effort, model, "reasoning_effort")
        given = wanted | dict(self.chat_template_kwargs or {})
        return tuple(given.items())

    @property
    def num_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to return at each position; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_tokens_wanted(self) -> int | None:
        """Most tokens of the answer, by either of the field's two names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def length_param(self) -> str:
        """The name of the two that the request uses."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(
        description="Null where the model only calls functions, or does not get beyond reasoning."
    )
    reasoning_content: str | None = Field(
        default=None,
        exclude_if=lambda text: not text,
        description="The model's reasoning. Absent, as at OpenAI, if there is none.",
    )
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = Field(
        default=None,
        exclude_if=lambda calls: not calls,
        description="The functions that the model calls. Absent, as at OpenAI, if it calls none.",
    )


class Choice(BaseModel):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: AnswerFinish


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: PromptPositions | None = Field(
        default=None, exclude_if=lambda positions: positions is None, description=PROMPT_LOGPROBS
    )

    @property
    def text(self) -> str:
        """The first answer's text; empty if it only calls functions."""
        return self.choices[0].message.content or ""


class CalledFunctionDelta(BaseModel):
    """What a chunk adds to a call: first the function's name, then its arguments bit by bit."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What a chunk adds to one of a message's calls: id and type only come first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatDelta(BaseModel):
    """What a chunk adds to a message: the role, then reasoning, then text and calls of tools."""

    role: Literal["assistant"] | None = None
    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: AnswerFinish | None


class ChatChunk(Chunk):
    """One chunk of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
