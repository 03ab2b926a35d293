"""The fields that chat completions and completions share, in requests and in chunks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from serve_app.api.body.strict_body import StrictBody
from serve_app.api.openai.sampling_schema import SamplingFields
from serve_app.api.openai.usage import Usage
from serve_app.config import MAX_NUM_CHOICES


class StreamOptions(StrictBody):
    """What a stream holds besides the text."""

    include_usage: bool | None = Field(
        default=None, description="Send a last chunk with the usage and no choice."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: put the usage so far into every chunk."
    )

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
    needs: ClassVar[Mapping[str, str]] = {"continuous_usage_stats": "include_usage"}


class AnswerFields(SamplingFields):
    """Which model answers, how many times, and whether as a stream."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_CHOICES,
        description="How many answers. The first is the answer that n: 1 gives.",
    )
    user: str | None = Field(default=None, description="Accepted, but neither kept nor read.")

    needs: ClassVar[Mapping[str, str]] = {**SamplingFields.needs, "stream_options": "stream"}

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # vLLM's
        "allowed_token_ids": (),
        "bad_words": ([],),
        "cache_salt": (),
        "include_stop_str_in_output": (False,),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "priority": (0,),
        "prompt_logprobs": (0,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    }


class Chunk(BaseModel):
    """The fields that the chunks of both surfaces share.

    Models of chunks only document them. Chunks are written as plain dictionaries, for speed; tests
    validate them against these models.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    usage: Usage | None = Field(default=None, description="If stream_options ask for it.")
