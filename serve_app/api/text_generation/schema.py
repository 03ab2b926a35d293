"""The plain surface on the wire: takes a prompt or messages, returns text and its token counts."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from deployments.contract.descriptions import ModelDescription
from deployments.contract.messages import TemplatePairs
from serve_app.api.conversation import Conversation
from serve_app.api.openai.prompt_schema import Messages, prompt_or_conversation
from serve_app.api.openai.sampling_schema import SamplingFields
from serve_app.api.openai.template_schema import (
    TEMPLATE_KWARGS_DESCRIPTION,
    TemplateKwargs,
    as_pairs,
)
from serve_app.config import LimitsConfig


class TextGenerationRequest(SamplingFields):
    """A request for text from `prompt` or `messages`; exactly one of the two."""

    prompt: str | None = Field(default=None, description="Continued without the chat template.")
    messages: Messages | None = Field(
        default=None, description="Rendered by the model's chat template."
    )
    stream: bool | None = Field(default=None, description="Null means true.")

    chat_template_kwargs: TemplateKwargs = Field(
        default=None, description=f"With messages: {TEMPLATE_KWARGS_DESCRIPTION}"
    )

    # Bookkeeping of older clients: accepted, but no answer depends on it.
    user_id: Any = None
    us_id: Any = None
    recommend: Any = None

    one_of: ClassVar[tuple[str, ...]] = ("prompt", "messages")

    def to_prompts(self, limits: LimitsConfig) -> Sequence[Conversation | str]:
        """Return the prompt, or the conversation."""
        return (prompt_or_conversation(self.prompt, self.messages),)

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template."""
        return as_pairs(self.chat_template_kwargs, self.messages)


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
