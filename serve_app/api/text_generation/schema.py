"""The plain surface on the wire: takes a prompt or messages, returns text and its token counts."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from serve_app.api.openai.sampling_schema import SamplingFields
from serve_app.api.openai.template_schema import PromptOrMessages


class TextGenerationRequest(SamplingFields, PromptOrMessages):
    """A request for text from `prompt` or `messages`; exactly one of the two."""

    prompt: str | None = Field(default=None, description="Continued without the chat template.")
    stream: bool | None = Field(default=None, description="Null means true.")

    # Bookkeeping of older clients: accepted, but no answer depends on it.
    user_id: Any = None
    us_id: Any = None
    recommend: Any = None


class TextGenerationAnswer(BaseModel):
    """A whole text."""

    response: str
    status: Literal[200] = 200
    time: str = Field(description="When the text was finished, in ISO 8601, UTC.")
    token_count: int = Field(description="Tokens of the text.")
    token_rate: float = Field(description="Tokens per second since the request was accepted.")


class TextGenerationEvent(BaseModel):
    """One event of a stream."""

    text: str
    token_count: int = Field(description="Tokens since the previous event.")
    total_token_count: int = Field(description="Tokens since the start.")
    token_rate: float = Field(description="Tokens per second since the request was accepted.")
