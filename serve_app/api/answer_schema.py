"""The fields that OpenAI's two surfaces for answers share."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from serve_app.api.sampling_schema import SamplingFields
from serve_app.api.strict_body import StrictBody
from serve_app.config import MAX_NUM_CHOICES


class StreamOptions(StrictBody):
    """What a stream tells beside the text."""

    include_usage: bool | None = Field(
        default=None, description="Send a last chunk that holds the usage and no choice."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: every chunk holds the usage so far."
    )

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
    needs: ClassVar[Mapping[str, str]] = {"continuous_usage_stats": "include_usage"}


class AnswerFields(SamplingFields):
    """Which model answers, how often, and whether as a stream."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_CHOICES,
        description="How many answers. The first is the one that n: 1 gives.",
    )
    user: str | None = Field(default=None, description="Accepted; neither kept nor read.")

    needs: ClassVar[Mapping[str, str]] = {"stream_options": "stream"}

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # vLLM's
        "allowed_token_ids": (),
        "bad_words": ([],),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
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
