"""What crosses the handle between the ingress and a model replica.

Plain frozen data that pickles, made so that a running stream can move to another replica: a request
may carry the token ids that were already generated, each delta carries its own, and sampling is
keyed by (seed, position).
"""

from dataclasses import dataclass, field
from typing import Literal

from deployments.engine.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.engine.sampling_params import InvalidParameterError, SamplingParams

__all__ = [
    "Accepted",
    "ChatMessage",
    "FinishReason",
    "GenerationEvent",
    "GenerationRequest",
    "ImagePart",
    "InvalidParameterError",
    "ModelDescription",
    "Refused",
    "RequestGroup",
    "SamplingParams",
    "TextDelta",
    "TextPart",
    "TokenLogprob",
    "TokenLogprobs",
]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text in a message; what is logged by accident holds none of it."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An encoded image (PNG, JPEG, WebP or GIF) in a message."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[TextPart | ImagePart, ...]


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """What one HTTP request asks for in several sequences; admitted whole or not at all.

    Attributes:
        id: Unique among all groups.
        size: Number of sequences.
        is_first: Whether this is the one that is sent first and asks for all. The others are sent
            once it is accepted.
    """

    id: str
    size: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A text to generate.

    Attributes:
        request_id: Names the request in logs and in the engine.
        prompt: Messages for the model's chat template, a plain string, or token ids.
        sampling: How tokens are chosen and when the text ends.
        generated_token_ids: Tokens that another replica has generated already. Generation goes on
            behind them; they count towards `max_tokens` and are not sent again.
        group: The sequences that it belongs to, if it is not the only one of its HTTP request.
    """

    request_id: str
    prompt: tuple[ChatMessage, ...] | str | tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()
    group: RequestGroup | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first thing that a replica sends: the request is tokenized, fits, and is queued.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        replica_id: Tells the replicas of a model apart.
    """

    num_prompt_tokens: int
    replica_id: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The only thing that a full replica sends.

    An event and no exception: Ray logs each of those with its traceback, which costs more than the
    rest of a refusal, when there is least time for it.

    Attributes:
        message: What is full.
        retry_after_s: When there will be room, as far as one can tell.
        replica_id: Tells the replicas of a model apart.
    """

    message: str
    retry_after_s: float
    replica_id: str = ""


GenerationEvent = Accepted | Refused | TextDelta


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a replica serves, asked once by each ingress.

    Attributes:
        id: The name that clients ask for.
        created: When the replica had loaded the model, in Unix seconds.
        max_model_len: Tokens of prompt and answer together.
        accepts_images: Whether messages may hold images.
        default_sampling: What a request that names no value gets.
    """

    id: str
    created: int
    max_model_len: int
    accepts_images: bool
    default_sampling: SamplingParams
