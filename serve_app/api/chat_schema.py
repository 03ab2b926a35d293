"""OpenAI's chat completions on the wire: the request's fields and the answer's.

The chunks of a stream are made in `chat_chunks`.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.engine.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.answer_schema import AnswerFields
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.message_schema import Messages
from serve_app.api.usage import Usage


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
    parallel_tool_calls: bool | None = None

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
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
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
    content: str
    refusal: None = None


class Choice(BaseModel):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[Choice]
    usage: Usage
