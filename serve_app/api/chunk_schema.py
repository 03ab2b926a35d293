"""The chunks of streamed answers, as /openapi.json tells of them.

The chunks themselves are made as plain dictionaries by `answer_stream` and the framers, for speed;
the tests hold them against these models.
"""

from typing import Literal

from pydantic import BaseModel, Field

from serve_app.api.chat_deltas import AnswerFinish
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.completion_logprobs import CompletionLogprobs
from serve_app.api.usage import Usage
from serve_app.generation import TrueFinish


class _Chunk(BaseModel):
    """What the chunks of both surfaces share."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage | None = Field(default=None, description="As stream_options ask for it.")


class CalledFunctionDelta(BaseModel):
    """What a call gains: its function's name first, then its arguments in pieces."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What one of a message's calls gains: its id and type come first and once."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatDelta(BaseModel):
    """What a message gains: the role first, then text and calls of tools."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What one of the answers gains."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: AnswerFinish | None


class ChatChunk(_Chunk):
    """A piece of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunkChoice(BaseModel):
    """What one of the answers gains."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: TrueFinish | None


class CompletionChunk(_Chunk):
    """A piece of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
