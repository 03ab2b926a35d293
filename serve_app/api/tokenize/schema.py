"""Tokenizing and detokenizing on the wire, in the shapes of vLLM's server.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Tokenizer API)
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, Field

from deployments.contract.descriptions import ModelDescription
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.openai.prompt_schema import TokenIds
from serve_app.api.openai.template_schema import PromptOrMessages
from serve_app.api.tools.offer import ToolChoice, ToolOffer
from serve_app.api.tools.schema import Tools, placed, to_offer
from serve_app.config import LimitsConfig


class TokenizeBody(PromptOrMessages):
    """A prompt, or messages for the chat template; exactly one of the two."""

    prompt: str | None = Field(default=None, description="Tokenized without the chat template.")
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the tokenizer's special tokens. Null means true for a prompt, and false "
        "for messages, because a chat template writes them itself.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="With messages: end with the beginning of the assistant's turn. Null means "
        "true.",
    )
    return_token_strs: bool | None = Field(
        default=None, description="Also return each token as the vocabulary writes it."
    )

    tools: Tools | None = Field(
        default=None, description="With messages: the tools that the chat template describes."
    )

    needs: ClassVar[Mapping[str, str]] = {"add_generation_prompt": "messages", "tools": "messages"}

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return the functions that the chat template describes; see `tools.schema.to_offer`."""
        return to_offer(placed(self.tools), ToolChoice(), limits, model)


class Tokens(BaseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int = Field(description="Tokens of prompt and answer together.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(StrictBody):
    """Token ids to turn into text."""

    model: str | None = Field(
        default=None, description="Null means the first model that generates."
    )
    tokens: TokenIds


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str
