"""OpenAI's chat completions on the wire: the request's fields and the answer's.

The chunks of a stream are made in `chat_chunks`.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deployments.contract import ModelDescription
from deployments.engine.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.message_schema import Messages
from serve_app.api.sampling_schema import SamplingFields
from serve_app.api.strict_body import StrictBody
from serve_app.api.tool_offer import ToolOffer
from serve_app.api.tool_schema import AnswerToolCall, ToolChoiceField, Tools, to_offer
from serve_app.config import LimitsConfig

MAX_NUM_CHOICES = 16
"""Answers to one request: each is a sequence of its own on a replica."""


class StreamOptions(StrictBody):
    """What a stream tells beside the text."""

    include_usage: bool | None = Field(
        default=None, description="Send a last chunk that holds the usage and no choice."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: every chunk holds the usage so far."
    )

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    model: str
    messages: Messages
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The newer name of max_tokens."
    )
    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_CHOICES,
        description="How many answers. The first is the one that n: 1 gives.",
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
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
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
        "allowed_token_ids": (),
        "bad_words": ([],),
        "best_of": (1,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "echo": (False,),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "include_reasoning": (True, False),
        "include_stop_str_in_output": (False,),
        "length_penalty": (1,),
        "priority": (0,),
        "prompt_logprobs": (0,),
        "return_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
    }

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "stream_options needs stream: true.", {"field": "stream_options"}
            )
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise PydanticCustomError(
                "max_tokens",
                "max_tokens and max_completion_tokens differ; send one of them.",
                {"field": "max_tokens"},
            )
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "top_logprobs needs logprobs: true.", {"field": "top_logprobs"}
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


class Usage(BaseModel):
    """Tokens, counted by the replica."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_prompt_tokens: int, num_completion_tokens: int) -> Self:
        """Return the usage with its sum."""
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
        )


class AnswerMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="Null where the model has called and said nothing.")
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = Field(
        default=None, description="What the model calls, if it does."
    )

    @model_serializer(mode="wrap")
    def _leave_out_no_calls(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave the calls out where there are none, as OpenAI does."""
        fields: dict[str, Any] = serialize(self)
        return {key: fields[key] for key in fields if key != "tool_calls" or self.tool_calls}


class Choice(BaseModel):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
