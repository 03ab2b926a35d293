"""The messages between the ingress and a model replica.

They are frozen dataclasses that pickle. A running stream can move to another replica: a request may
carry the token ids that were generated so far, each delta carries its own, and sampling is keyed by
(seed, position).
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from deployments.contract.claims import Claim
from deployments.contract.errors import InvalidRequestError, ModelChangedError, OverloadedError
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.messages import ChatMessage, TemplatePairs, Tool
from deployments.contract.output import TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.telemetry.tracing import TraceContext

AnswerT_co = TypeVar("AnswerT_co", covariant=True)

PROBATION_TOKENS: Final = 1
"""Tokens that a suspect must gain on probation: encoding and prefill are where a request kills a
replica."""

PROBATION_TOKENS_AGAIN: Final = 32
"""Tokens that it must gain after a second death: it may need some tokens to kill a replica."""


class Request(Generic[AnswerT_co]):
    """What a model is asked; the parameter is the type of what the ingress gets for it."""

    __slots__ = ()


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
class GenerationRequest(Request["GenerationStream"]):
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
        adapter: The id of the model's LoRA adapter that it runs with; None runs the model itself.
        claim: What it may claim beside other requests.
        may_park: Whether its ingress takes it back if others displace it, to offer it again later.
        is_parked: Whether its ingress holds it and offers it again. A replica gives it back if it
            has no turn there soon.
        refused_by: Replicas that have refused this offer, by Serve's ids. The backend sets it, and
            Serve's router passes them over while another replica runs.
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
    adapter: str | None = None
    claim: Claim = field(default_factory=Claim)
    may_park: bool = False
    is_parked: bool = False
    refused_by: frozenset[str] = frozenset()

    @property
    def is_admitted(self) -> bool:
        """Whether a replica has already admitted its HTTP request; then it is never refused."""
        return self.is_resumed or (self.group is not None and not self.group.is_first)

    @property
    def is_parkable(self) -> bool:
        """Whether its ingress takes it back: not a suspect, whose probation goes on."""
        return self.may_park and not self.num_deaths


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
class Waking:
    """An event before all others, at once and from time to time: the replica sleeps, and wakes.

    Attributes:
        model_id: The model.
        waited_s: How long the request has waited for that.
        replica_id: As Serve names the replica.
    """

    model_id: str
    waited_s: float
    replica_id: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is tokenized, fits and is queued; only `Waking` and `Started` come before.

    Attributes:
        num_prompt_tokens: Tokens of the prompt.
        replica_id: Identifies the replica among those of its model.
        reasoning: What the end of the prompt says about the model's reasoning.
        channel: Where the replica waits for the ingress, to send it the deltas.
        fingerprint: The version of the replica's model; see `ModelDescription`.
        prompt_digest: See `EncodedPrompt` in `generator.prompt_encoder`.
        start_s: Seconds that the replica took to start.
    """

    num_prompt_tokens: int
    replica_id: str = ""
    reasoning: PromptReasoning = PromptReasoning.OPEN
    channel: ChannelAddress | None = None
    fingerprint: str | None = None
    prompt_digest: bytes = b""
    start_s: float = 0.0


class GenerationStream(Protocol):
    """The deltas of one accepted request."""

    @property
    def accepted(self) -> Accepted:
        """The answer of the first replica that accepted the request."""
        ...

    @property
    def waited_until_s(self) -> float:
        """When it last stopped waiting to go on elsewhere, by the event loop's clock.

        Now while it looks for a replica, or is parked until its turn comes: nothing can come then,
        and its client hears why. 0 if it has never waited.
        """
        ...

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Iterate over lists of deltas: each holds all that became ready since the last.

        The iteration ends after a delta whose finish reason is `STOP` or `LENGTH`. In place of any
        other end it raises, unless the stream is closed: then it may end without a finish.

        Raises:
            GenerationAbortedError: The replica was stopped.
            GenerationFailedError: The sequence has failed.
            RaystreamError: The replica has failed.
        """
        ...

    async def aclose(self) -> None:
        """Abort the sequence unless it has ended; closing twice is harmless.

        A reader that waits for deltas gets a `ReplicaUnavailableError`, or its iteration ends.
        """
        ...


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


GenerationEvent = Waking | Started | Accepted | Refused
"""What the call of a request yields; its deltas take the channel."""


@dataclass(frozen=True, slots=True)
class TokenizeRequest(Request["TokenizedPrompt"]):
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


def num_tokens_of_probation(num_deaths: int) -> int:
    """Return how many tokens a request must gain on probation, by its number of deaths."""
    return (0, PROBATION_TOKENS, PROBATION_TOKENS_AGAIN)[min(num_deaths, 2)]
