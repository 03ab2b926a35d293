"""The plain surface on the wire: a prompt or messages in, text with exact token counts out."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from serve_app.api.message_schema import Messages
from serve_app.api.sampling_schema import SamplingFields


class TextGenerationRequest(SamplingFields):
    """A request for text: `prompt` or `messages`, one of the two."""

    prompt: str | None = Field(default=None, description="Continued as it stands.")
    messages: Messages | None = Field(
        default=None, description="Put into the model's chat template."
    )
    model: str | None = Field(default=None, description="Null means the first model.")
    stream: bool | None = Field(default=None, description="Null means true.")

    # Bookkeeping of older clients: accepted, changes no answer.
    user_id: Any = None
    us_id: Any = None
    recommend: Any = None

    one_of: ClassVar[tuple[str, ...]] = ("prompt", "messages")


class TextGenerationAnswer(BaseModel):
    """A whole text."""

    response: str
    status: Literal[200] = 200
    time: str = Field(description="When the text was finished: ISO 8601, UTC.")
    token_count: int = Field(description="Tokens of the text.")
    token_rate: float = Field(description="Tokens per second since the request was accepted.")


class TextGenerationEvent(BaseModel):
    """One event of a stream."""

    text: str
    token_count: int = Field(description="Tokens since the event before.")
    total_token_count: int = Field(description="Tokens since the start.")
    token_rate: float = Field(description="Tokens per second since the request was accepted.")
