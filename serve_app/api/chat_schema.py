"""OpenAI's chat completions on the wire: the request's fields and the answer's.

The chunks of a stream are made in `chat_chunks`.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.contract import ModelDescription
from deployments.engine.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.answer_schema import AnswerFields
from serve_app.api.chat_deltas import AnswerFinish
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.message_schema import Messages
from serve_app.api.tool_offer import ToolOffer
from serve_app.api.tool_schema import AnswerToolCall, ToolChoiceField, Tools, to_offer
from serve_app.api.usage import Usage
from serve_app.config import LimitsConfig


class ChatRequest(AnswerFields):
    """A request for the next message of a conversation."""

    messages: Messages
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(
        default=None, description="Tell how likely each token was to the model."
    )
    top_logprobs: int | None = Field(
        default=None,
        description="With logprobs: tell this many of the likeliest tokens at each place, too.",
        json_schema_extra={"minimum": 0, "maximum": MAX_NUM_TOP_LOGPROBS},
    )

    tools: Tools | None = Field(default=None, description="What the model may call.")
    tool_choice: ToolChoiceField | None = Field(
        default=None,
        description="Whether it must call, and what; without tools there is nothing to choose.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="False: an answer ends with its first call."
    )

    # Bookkeeping: accepted, changes no answer.
    metadata: dict[str, Any] | None = Field(
        default=None, description="Accepted; neither kept nor read."
    )
    safety_identifier: str | None = Field(
        default=None, description="Accepted; neither kept nor read."
    )
    prompt_cache_key: str | None = Field(
        default=None,
        description="Accepted; prompts that begin alike are found without it.",
    )

    needs: ClassVar[Mapping[str, str]] = {**AnswerFields.needs, "top_logprobs": "logprobs"}

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **AnswerFields.unsupported,
        # OpenAI's
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": ("none",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
        # vLLM's
        "add_generation_prompt": (True,),
        "best_of": (1,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "echo": (False,),
        "include_reasoning": (True, False),
    }

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

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return what the model may call; see `tool_schema.to_offer`."""
        return to_offer(self.tools, self.tool_choice, self.parallel_tool_calls, limits, model)

    @property
    def num_logprobs_wanted(self) -> int | None:
        """How many likely tokens to tell at each place; None tells nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_tokens_wanted(self) -> int | None:
        """Most tokens of the answer, under whichever name they were given."""
        return self.max_completion_tokens or self.max_tokens


class AnswerMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="Null where the model has called and said nothing.")
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = Field(
        default=None,
        exclude_if=lambda calls: not calls,
        description="What the model calls; left out where it calls nothing, as OpenAI does.",
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
