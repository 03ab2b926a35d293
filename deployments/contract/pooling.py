"""What the server asks of a pooler, and what it answers."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from deployments.contract.claims import Claim
from deployments.contract.generation import ChannelAddress, Refused, Request, Started, Waking
from deployments.contract.telemetry.tracing import TraceContext


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
class PoolingRequest(Request["tuple[PooledText, ...]"]):
    """Texts of one HTTP request; all of them are admitted, or none.

    `TextPooler.pool` answers it with `Pooled`, `Refused` or `Asleep`.

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
        num_deaths: See `GenerationRequest`. A suspect is sent to `pool_in_turn`, which answers
            `Started` first.
        trace: See `GenerationRequest`.
        elapsed_s: See `GenerationRequest`.
        claim: See `GenerationRequest`.
        refused_by: See `GenerationRequest`. Channels don't carry it.
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
    claim: Claim = field(default_factory=Claim)
    refused_by: frozenset[str] = frozenset()


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


@dataclass(frozen=True, slots=True)
class Asleep:
    """The model has no turn on its device (`deployments.turns`), and the texts are not answered.

    `TextPooler.pool_in_turn` waits for the next turn.

    Attributes:
        replica_id: Identifies the replica among those of its model.
    """

    replica_id: str = ""


PoolingAnswer = Pooled | Refused | Asleep

PoolingEvent = Waking | Started | PoolingAnswer


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where a replica takes pooled requests without Serve's call.

    Attributes:
        replica_id: Identifies the replica among those of its model.
        channel: Where it listens; None if each of its requests must be one of Serve's calls.
    """

    replica_id: str
    channel: ChannelAddress | None
