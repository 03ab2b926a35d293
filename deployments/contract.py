"""The messages between the ingress and a model replica.

They are frozen dataclasses that pickle. A running stream can move to another replica: a request may
carry the token ids that were generated so far, each delta carries its own, and sampling is keyed by
(seed, position).
"""

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from deployments.engine.output import (
    FinishReason,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    TokenLogprobs,
)
from deployments.engine.sampling_params import (
    InvalidParameterError,
    ReasoningTokens,
    SamplingParams,
)
from deployments.errors import InvalidRequestError, ModelChangedError, OverloadedError
from deployments.reasoning_format import PromptReasoning
from deployments.tracing import TraceContext

__all__ = [
    "IMAGE_FORMATS",
    "Accepted",
    "ChannelAddress",
    "ChatMessage",
    "EmbeddingDescription",
    "FinishReason",
    "Footprint",
    "GenerationEvent",
    "GenerationRequest",
    "ImagePart",
    "InvalidParameterError",
    "ModelDescription",
    "Pooled",
    "PooledText",
    "PoolerDescription",
    "PoolingEvent",
    "PoolingInput",
    "PoolingOperation",
    "PoolingRequest",
    "PromptLogprobs",
    "PromptReasoning",
    "ReasoningDescription",
    "ReasoningTokens",
    "Refused",
    "RequestGroup",
    "SamplingParams",
    "Started",
    "StreamKey",
    "TemplatePairs",
    "TemplateValue",
    "TextDelta",
    "TextPair",
    "TextPart",
    "TokenLogprob",
    "TokenLogprobs",
    "TokenizeRequest",
    "TokenizedPrompt",
    "Tool",
    "ToolCall",
]

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that Pillow may open; it knows more, and some of them start other programs."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a message that is text; its `repr` hides the text from logs."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An encoded image of one of the `IMAGE_FORMATS`, in a message."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: The function's name, of letters, digits, `_` and `-`.
        description: What the function does; None leaves it out of the prompt.
        parameters: The JSON schema of the function's arguments, as a JSON string.
    """

    name: str
    description: str | None = field(repr=False)
    parameters: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the assistant.

    Attributes:
        id: The call's id, which the tool's message refers to.
        name: The function's name.
        arguments: JSON, as a string: an object, or one string that holds the broken arguments of a
            call that was cut.
    """

    id: str
    name: str
    arguments: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: Whose turn it is; a tool's turn holds the result of one call.
        parts: The content; empty if the assistant only calls tools.
        tool_calls: The assistant's calls.
        tool_call_id: The call that a tool's turn answers; None for other roles.
        name: The function whose result a tool's turn holds; None for other roles.
        reasoning_content: The assistant's reasoning in an earlier turn. The chat template decides
            what the model sees of it.
    """

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = field(default=None, repr=False)


TemplateValue = str | int | float | bool | None
"""A value that a request may give to a parameter of the chat template."""

TemplatePairs = tuple[tuple[str, TemplateValue], ...]
"""Such values, each with the parameter's name."""


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """The sequences of one HTTP request; all of them are admitted, or none.

    Attributes:
        id: Unique among all groups.
        size: Number of sequences.
        is_first: Whether this sequence is sent first and asks for the whole group. The others are
            sent once it is accepted.
    """

    id: str
    size: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class StreamKey:
    """Where a sequence's deltas go: a stream of the channel between an ingress and a replica.

    Attributes:
        channel_id: Names the ingress; the same in all its channels.
        number: Unique among all streams of this ingress.
    """

    channel_id: str
    number: int


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a replica waits for the channels of ingresses; see `deployments.channel`.

    Attributes:
        host: The node's address.
        port: The TCP port.
        secret: What an ingress must show.
        uses_tls: Whether the replica speaks TLS there.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    uses_tls: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one text.

    Attributes:
        request_id: Names the request in logs and in the engine.
        prompt: Messages for the model's chat template, a plain string, or token ids.
        sampling: How tokens are chosen and when the text ends.
        generated_token_ids: Tokens that another replica has already generated. Generation continues
            after them; they count towards `max_tokens` and are not sent again.
        is_resumed: Whether another replica had accepted it and was lost, or is about to end. It
            runs before sequences that are new to the replica, and is not refused for lack of room.
        is_planned: Whether the replica that runs it goes on until another has accepted it, because
            it is about to end. Then a replica where it would have to wait refuses it.
        fingerprint: The only version of the model that may go on with it; see `ModelDescription`.
            None takes any.
        num_deaths: How many replicas were lost, one after the other, while they may have run it; 0
            if that says nothing about it. From 1 on, it is a suspect: a replica runs suspects one
            at a time until each has shown that it is not the cause, and begins with one only after
            `Started` and the ingress's go-ahead.
        group: The group of its HTTP request's sequences, if there is more than one.
        tools: The functions that the chat template offers to the model.
        template_kwargs: Values for the chat template's own parameters, by name.
        default_max_tokens: The most tokens of the answer if `sampling` sets no limit; the model's
            length may leave fewer. None means the value of the model's generation config.
        length_param: The client's name of `max_tokens`, for the error if the model's length leaves
            fewer tokens. None lowers it to what is left instead.
        stream: Where the deltas go. The backend sets it for each call.
        elapsed_s: Seconds since the client's request arrived. The backend sets it for each call.
        trace: The span above; None if its trace is not recorded.
        num_prompt_logprobs: Tokens of the prompt whose log-probabilities another replica has
            already sent; they are not sent again.
    """

    request_id: str
    prompt: tuple[ChatMessage, ...] | str | tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    generated_token_ids: tuple[int, ...] = ()
    is_resumed: bool = False
    is_planned: bool = False
    fingerprint: str | None = None
    num_deaths: int = 0
    group: RequestGroup | None = None
    tools: tuple[Tool, ...] = ()
    default_max_tokens: int | None = None
    length_param: str | None = None
    template_kwargs: TemplatePairs = field(default=(), repr=False)
    stream: StreamKey | None = field(default=None, repr=False)
    elapsed_s: float = 0.0
    trace: TraceContext | None = field(default=None, repr=False)
    num_prompt_logprobs: int = 0

    @property
    def is_admitted(self) -> bool:
        """Whether a replica has already admitted its HTTP request; then it is never refused."""
        return self.is_resumed or (self.group is not None and not self.group.is_first)


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a suspect's call: its turn has come.

    It begins once the ingress has given its go-ahead over the channel. From then on, its replica's
    death is blamed on it.

    Attributes:
        channel: Where the replica waits for the ingress.
        number: Names the suspect in the go-ahead.
    """

    channel: ChannelAddress
    number: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of a call, but for `Started`: the request is tokenized, fits and is queued.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        replica_id: Identifies the replica among those of its model.
        reasoning: What the end of the prompt says about the model's reasoning.
        channel: Where the replica waits for the ingress, to send it the deltas.
        fingerprint: The version of the replica's model; see `ModelDescription`.
        prompt_digest: See `EncodedPrompt` in `generator.prompt_encoder`.
    """

    num_prompt_tokens: int
    replica_id: str = ""
    reasoning: PromptReasoning = PromptReasoning.OPEN
    channel: ChannelAddress | None = None
    fingerprint: str | None = None
    prompt_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Refused:
    """A replica's only answer to a request that it does not run, though nothing of ours has failed.

    The request has a fault that its client has to mend, or the replica has no room for it, or is of
    another version than it needs. This is a value and not an exception because Serve logs every
    exception as an ERROR with its traceback: a client could fill the log, and under overload that
    would cost more than the rest of the refusal.

    Attributes:
        error: What the client is told; the ingress raises it.
        replica_id: Identifies the replica among those of its model.
        is_full: Whether the replica would have refused any other request too, however small.
    """

    error: InvalidRequestError | OverloadedError | ModelChangedError = field(repr=False)
    replica_id: str = ""
    is_full: bool = False


GenerationEvent = Started | Accepted | Refused
"""What the call of a request yields; its deltas take the channel."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A prompt to tokenize; nothing is generated.

    Attributes:
        prompt: Messages for the model's chat template, or a plain string.
        add_special_tokens: Whether the tokenizer adds the model's special tokens. None means as for
            generation: it adds them to a plain string; a chat template writes them itself.
        add_generation_prompt: Whether the rendered messages end with the start of the answer.
        with_strings: Whether to return each token's string in the vocabulary, too.
        tools: The functions that the chat template offers to the model.
        template_kwargs: Values for the chat template's own parameters, by name.
    """

    prompt: tuple[ChatMessage, ...] | str = field(repr=False)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    with_strings: bool = False
    tools: tuple[Tool, ...] = ()
    template_kwargs: TemplatePairs = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The tokens of a prompt, and their strings in the vocabulary if the request asks for them."""

    token_ids: tuple[int, ...] = field(repr=False)
    strings: tuple[str, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ReasoningDescription:
    """How a model marks its reasoning.

    Attributes:
        format: A key of `REASONING_FORMATS` in `reasoning_format`.
        tokens: The ids of the two marks.
        is_special: Whether the marks are special tokens, which normal decoding leaves out.
    """

    format: str
    tokens: ReasoningTokens
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a replica holds of a model, and where.

    Attributes:
        num_parameters: All weights; tied ones count once.
        weight_bytes: The weights in memory.
        dtype: Name of the type of the weights, or how they are quantized.
        device: The device's name.
    """

    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model that a text replica serves; each ingress asks for it once.

    Attributes:
        id: The name that clients ask for.
        created: When the replica finished loading the model, in Unix seconds.
        max_model_len: The most tokens of prompt and answer together.
        accepts_images: Whether messages may hold images.
        default_sampling: The values for parameters that a request does not set.
        accepts_tools: Whether the chat template can offer tools to the model.
        tool_call_format: How the model writes calls: a key of `FORMATS` in `tool_call_format`, or
            None if that is unknown.
        tool_call_token_ids: The marks of the format that are special tokens of the tokenizer, with
            their ids.
        reasoning: How the model marks its reasoning; None if its answers have none.
        template_parameters: The names that the chat template reads besides messages and tools; a
            request may set them.
        system_fingerprint: The version of the model and of what computes it. Replicas of the same
            version continue each other's texts.
        root: The hub repository of the model's files; None or the id if they lie in a folder.
        default_max_tokens: The most tokens of a chat's answer whose request sets no limit; None
            means as many as the model's length leaves.
        footprint: What the replica that tells it holds; None from the files of a model that sleeps.
        has_chat_template: Whether it answers messages; a base model only continues texts.
    """

    id: str
    created: int
    max_model_len: int
    accepts_images: bool
    default_sampling: SamplingParams
    accepts_tools: bool = False
    tool_call_format: str | None = None
    tool_call_token_ids: tuple[tuple[str, int], ...] = ()
    reasoning: ReasoningDescription | None = None
    template_parameters: tuple[str, ...] = ()
    system_fingerprint: str | None = None
    root: str | None = None
    default_max_tokens: int | None = None
    footprint: Footprint | None = None
    has_chat_template: bool = True


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a cross-encoder reads together, as one sequence."""

    first: str = field(repr=False)
    second: str = field(repr=False)


PoolingInput = str | TextPair | tuple[int, ...]
"""A text, two that are read together, or token ids, which get no special tokens."""

PoolingOperation = Literal["classify", "embeddings", "rerank", "score"]
"""What a client asks for, as traces name it."""


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Texts of one HTTP request; all of them are admitted, or none.

    `TextPooler.pool` answers it with `Pooled` or `Refused`.

    Attributes:
        request_id: Names the request in logs.
        texts: At least one; each is one sequence of the model.
        truncate: Whether to drop the end of a text that is too long; otherwise it is an error.
        max_num_tokens: The most tokens to keep of a text, special ones included; None means the
            model's length. Ignored without `truncate`.
        max_text_tokens: The most tokens to keep of a text, and of a pair's second text; special
            ones don't count. None keeps all.
        num_whole: How many texts, from the first on, `max_text_tokens` leaves as they are.
        operation: What the client asks for.
        num_deaths: See `GenerationRequest`. A suspect is sent to `pool_suspect`, which answers
            `Started` first.
        trace: See `GenerationRequest`.
        elapsed_s: See `GenerationRequest`.
    """

    request_id: str
    texts: tuple[PoolingInput, ...] = field(repr=False)
    truncate: bool = False
    max_num_tokens: int | None = None
    max_text_tokens: int | None = None
    num_whole: int = 0
    operation: PoolingOperation = "classify"
    num_deaths: int = 0
    trace: TraceContext | None = field(default=None, repr=False)
    elapsed_s: float = 0.0


ROW_DTYPE = np.dtype("<f4")
"""The type of the numbers in `PooledText.row`."""


@dataclass(frozen=True, slots=True)
class PooledText:
    """The model's result for one text.

    Attributes:
        row: Numbers, float32 in little-endian order: the scores of the model's labels, or the
            vector of an embedding model. Bytes travel faster than lists.
        num_tokens: Tokens that the model has read, special ones included.
        is_truncated: Whether the end of the text was dropped.
    """

    row: bytes = field(repr=False)
    num_tokens: int
    is_truncated: bool = False

    @property
    def vector(self) -> npt.NDArray[np.float32]:
        """The numbers, [width]; read-only."""
        return np.frombuffer(self.row, ROW_DTYPE)

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores, in the order of `PoolerDescription.labels`.

        They sum to one, unless the model is multi-label: then each is independent.
        """
        return tuple(self.vector.tolist())


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a request.

    Attributes:
        texts: In the order of the request's texts.
        replica_id: Identifies the replica among those of its model.
    """

    texts: tuple[PooledText, ...]
    replica_id: str = ""


PoolingEvent = Started | Pooled | Refused


@dataclass(frozen=True, slots=True)
class EmbeddingDescription:
    """The vectors of an embedding model.

    Attributes:
        width: Numbers of a vector.
        is_normalized: Whether their length is 1.
        dimensions: The widths that its vectors may be cut to (Matryoshka); empty allows all, None
            none.
        prompts: Texts that go before a client's text, by name.
        default_prompt: The name of the prompt for requests that name none; None uses none.
    """

    width: int
    is_normalized: bool
    dimensions: tuple[int, ...] | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class PoolerDescription:
    """The model that a pooler's replica serves; each ingress asks for it once.

    Attributes:
        id: The name that clients ask for.
        created: When the replica finished loading the model, in Unix seconds.
        max_model_len: The most tokens of one text, special ones included.
        labels: In the order of the model's outputs; empty if it embeds.
        is_multi_label: Whether a text may have several labels (sigmoid instead of softmax).
        embedding: The vectors of a model that embeds; None if it classifies.
        root: See `ModelDescription`.
        footprint: See `ModelDescription`.
    """

    id: str
    created: int
    max_model_len: int
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False
    embedding: EmbeddingDescription | None = None
    root: str | None = None
    footprint: Footprint | None = None
