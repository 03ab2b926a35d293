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
    "Classification",
    "ClassificationRequest",
    "Classified",
    "ClassifierDescription",
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
    "TokenizeRequest",
    "TokenizedPrompt",
    "Tool",
    "ToolCall",
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
class Tool:
    """A function that the model may call.

    Attributes:
        name: Letters, digits, `_` and `-`.
        description: What it does; None leaves it out of the prompt.
        parameters: The JSON schema of its arguments, as JSON.
    """

    name: str
    description: str | None = field(repr=False)
    parameters: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant has made.

    Attributes:
        id: What the answer to it refers to.
        name: The function's.
        arguments: An object, as JSON.
    """

    id: str
    name: str
    arguments: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: Whose turn it is; a tool's turn is what one call has returned.
        parts: May be none, where the assistant does nothing but call.
        tool_calls: The assistant's calls.
        tool_call_id: Of a tool's turn alone: the call that it answers.
        name: Of a tool's turn alone: the function that was called.
    """

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


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
        tools: What the chat template tells the model it may call.
        default_max_tokens: Most tokens of the answer where `sampling` names none; the model's
            length may leave less. None means what the model's generation config says.
    """

    request_id: str
    prompt: tuple[ChatMessage, ...] | str | tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()
    group: RequestGroup | None = None
    tools: tuple[Tool, ...] = ()
    default_max_tokens: int | None = None

    @property
    def is_admitted(self) -> bool:
        """Whether it belongs to what some replica has admitted before, and so is never refused."""
        return bool(self.generated_token_ids) or (
            self.group is not None and not self.group.is_first
        )


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
        is_full: Whether there was no room for any other request either, however small.
    """

    message: str
    retry_after_s: float
    replica_id: str = ""
    is_full: bool = False


GenerationEvent = Accepted | Refused | TextDelta


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A prompt whose tokens are asked for; nothing is generated.

    Attributes:
        prompt: Messages for the model's chat template, or a plain string.
        add_special_tokens: Whether the tokenizer adds the model's own. None means as for an answer:
            to a plain string; a chat template writes them itself.
        add_generation_prompt: Whether messages end where the answer begins.
        with_strings: Whether to tell the vocabulary's name of each token, too.
        tools: What the chat template tells the model it may call.
    """

    prompt: tuple[ChatMessage, ...] | str = field(repr=False)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    with_strings: bool = False
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The tokens of a prompt, and their names in the vocabulary if they were asked for."""

    token_ids: tuple[int, ...] = field(repr=False)
    strings: tuple[str, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a replica serves, asked once by each ingress.

    Attributes:
        id: The name that clients ask for.
        created: When the replica had loaded the model, in Unix seconds.
        max_model_len: Tokens of prompt and answer together.
        accepts_images: Whether messages may hold images.
        default_sampling: What a request that names no value gets.
        accepts_tools: Whether the chat template tells the model of tools.
        tool_call_format: How the model writes calls, a key of `FORMATS` in `tool_call_format`;
            None where that is unknown.
        tool_call_token_ids: The marks of that format which are special tokens of the tokenizer,
            with their ids.
        system_fingerprint: Another one may mean other texts for the same seed.
    """

    id: str
    created: int
    max_model_len: int
    accepts_images: bool
    default_sampling: SamplingParams
    accepts_tools: bool = False
    tool_call_format: str | None = None
    tool_call_token_ids: tuple[tuple[str, int], ...] = ()
    system_fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class ClassificationRequest:
    """Texts to classify for one HTTP request; admitted whole or not at all.

    `TextClassifier.classify` answers it with `Classified` or `Refused`.

    Attributes:
        request_id: Names the request in logs.
        texts: At least one; each is one sequence of the model.
        truncate: Whether the end of a text that is too long is dropped; else that is an error.
        max_num_tokens: Where it is dropped, special tokens included; None: as late as the model's
            length allows. Means nothing without `truncate`.
    """

    request_id: str
    texts: tuple[str, ...] = field(repr=False)
    truncate: bool = False
    max_num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Classification:
    """What the model says of one text.

    Attributes:
        probabilities: In the order of `ClassifierDescription.labels`. They sum to one, unless the
            model is a multi-label one: then each stands for itself.
        num_tokens: Tokens that the model has read, special ones included.
        is_truncated: Whether the text's end was dropped.
    """

    probabilities: tuple[float, ...]
    num_tokens: int
    is_truncated: bool = False


@dataclass(frozen=True, slots=True)
class Classified:
    """A request's answer.

    Attributes:
        classifications: In the order of its texts.
        replica_id: Tells the replicas of a model apart.
    """

    classifications: tuple[Classification, ...]
    replica_id: str = ""


@dataclass(frozen=True, slots=True)
class ClassifierDescription:
    """What a classifier's replica serves, asked once by each ingress.

    Attributes:
        id: The name that clients ask for.
        created: When the replica had loaded the model, in Unix seconds.
        max_model_len: Tokens of one text, special ones included.
        labels: By their number in the model's output.
        is_multi_label: Whether labels don't exclude one another (sigmoid in place of softmax).
    """

    id: str
    created: int
    max_model_len: int
    labels: tuple[str, ...]
    is_multi_label: bool
