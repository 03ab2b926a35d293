"""The fields that chat completions and completions share, in requests and in chunks."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, Field

from deployments.contract.sampling_params import MAX_NUM_TOP_LOGPROBS
from serve_app.api.body.priority import Priority
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.openai.sampling_schema import SamplingFields
from serve_app.api.openai.usage import Usage
from serve_app.config import MAX_NUM_CHOICES

PROMPT_LOGPROBS = (
    "The prompt's own token and the likeliest ones at each position, by their ids; null at the "
    "first position. Absent if the request does not ask for it."
)


class StreamOptions(StrictBody):
    """What a stream holds besides the text."""

    include_usage: bool | None = Field(
        default=None, description="Send a last chunk with the usage and no choice."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: put the usage so far into every chunk."
    )

    needs: ClassVar[Mapping[str, str]] = {"continuous_usage_stats": "include_usage"}


class AnswerFields(SamplingFields):
    """How many answers, and whether as a stream."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_NUM_CHOICES,
        description="How many answers. The first is the answer that n: 1 gives.",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_NUM_TOP_LOGPROBS,
        description="Return the log-probability of each token of the prompt, and this many of the "
        "likeliest tokens at its position. Not together with stream, nor for a prompt with images.",
    )
    priority: Priority = None
    user: str | None = Field(default=None, description="Accepted, but neither kept nor read.")

    needs: ClassVar[Mapping[str, str]] = {**SamplingFields.needs, "stream_options": "stream"}

    excludes: ClassVar[Mapping[str, str]] = {"stream": "prompt_logprobs"}

    @property
    def asked_priority(self) -> int | None:
        """The priority that the request names."""
        return self.priority

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return self.num_choices

    @property
    def num_prompt_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to return at each position of the prompt; None: none."""
        return self.prompt_logprobs


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
