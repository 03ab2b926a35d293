"""Tokens of a prompt and back, in the shapes of vLLM's server.

Source: https://docs.vllm.ai/en/stable/serving/openai_compatible_server/ (Tokenizer API)
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from serve_app.api.message_schema import Messages
from serve_app.api.strict_body import StrictBody
from serve_app.api.token_ids import TokenIds
from serve_app.api.tool_schema import Tools


class TokenizeBody(StrictBody):
    """A prompt, or messages for the chat template: one of the two."""

    model: str | None = Field(default=None, description="Null means the first model.")
    prompt: str | None = Field(default=None, description="Tokenized as it stands.")
    messages: Messages | None = Field(
        default=None, description="Put into the model's chat template."
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the tokenizer's own. Null means true for a prompt; a chat template "
        "writes them itself, so for messages it means false.",
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="With messages: end where the answer begins. Null means true."
    )
    return_token_strs: bool | None = Field(
        default=None, description="Tell the vocabulary's name of each token, too."
    )

    tools: Tools | None = Field(
        default=None, description="With messages: what the chat template tells of."
    )

    needs: ClassVar[Mapping[str, str]] = {"add_generation_prompt": "messages", "tools": "messages"}
    one_of: ClassVar[tuple[str, ...]] = ("prompt", "messages")
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "mm_processor_kwargs": ({},),
    }


class Tokens(BaseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int = Field(description="Tokens of prompt and answer together.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(StrictBody):
    """Token ids whose text is asked for."""

    model: str | None = Field(default=None, description="Null means the first model.")
    tokens: TokenIds


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str
