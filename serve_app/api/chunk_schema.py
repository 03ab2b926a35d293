"""The chunks of streamed answers, as /openapi.json tells of them.

The chunks themselves are made as plain dictionaries by `answer_stream` and the framers, for speed;
the tests hold them against these models.
"""

from typing import Literal

from pydantic import BaseModel, Field

from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.completion_logprobs import CompletionLogprobs
from serve_app.api.usage import Usage


class _Chunk(BaseModel):
    """What the chunks of both surfaces share."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage | None = Field(default=None, description="As stream_options ask for it.")


class ChatDelta(BaseModel):
    """What a message gains: the role first, then text."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What one of the answers gains."""

    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatChunk(_Chunk):
    """A piece of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunkChoice(BaseModel):
    """What one of the answers gains."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(_Chunk):
    """A piece of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
