"""What a replica needs of what computes its texts: a queue's jobs go in, rows of numbers come out.

All that is above this seam is the same for every engine: encoding, admission, health and metrics.
`deployments.pooling.device_worker` is the embedded side of it, and `deployments.vllm_engine`
vLLM's.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from deployments.plan.replica_report import MemoryPlan
from deployments.pooling.packed_backbone import TextModel


@dataclass(frozen=True, slots=True)
class PoolerFacts:
    """What is known of a model once its worker has started.

    Attributes:
        model: Its modules and configuration; without weights, on the device `meta`, if it runs in
            another process.
        tokenizer: The model's tokenizer.
        max_model_len: The most tokens of one text, special ones included.
        reads_types: Whether the model tells a pair's texts apart by the types of tokens.
        memory: How the replica's memory was divided.
        num_parameters: All weights; tied ones count once.
        dtype: Name of the type of the weights, or how they are quantized.
        num_threads: Number of compute threads.
        summary: A short description for the log.
        attention: How attention reads texts, in words; None if the engine does not say.
    """

    model: TextModel
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int
    reads_types: bool
    memory: MemoryPlan
    num_parameters: int
    dtype: str
    num_threads: int
    summary: str
    attention: str | None = None

    @property
    def vocab_size(self) -> int:
        """The tokens that the model has embeddings for."""
        size: int = self.model.config.get_text_config().vocab_size
        return size


@dataclass(frozen=True, slots=True)
class BatchStats:
    """The size of one micro-batch.

    Attributes:
        num_sequences: Number of texts.
        num_tokens: Number of tokens of all texts, without padding.
    """

    num_sequences: int
    num_tokens: int


class PoolingWorker(Protocol):
    """Answers the jobs of a queue, on threads of its own; closes the queue when it ends.

    It reports each micro-batch's `BatchStats`, on one of its threads, to a function that it was
    made with.
    """

    @property
    def num_batches(self) -> int:
        """Number of micro-batches so far, probes included."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What has ended the worker; None while it works, and if it was stopped."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether waiting requests will be answered."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether the current work has run for longer than any can take."""
        ...

    def ping(self) -> Future[None]:
        """Return a future that the next work completes; an idle device runs a probe."""
        ...

    async def sleep(self) -> bool:
        """Give memory back until `wake`, and return whether it has; no job may wait meanwhile.

        Raises:
            RaystreamError: The worker has ended.
        """
        ...

    async def wake(self) -> None:
        """Be ready for jobs again.

        Raises:
            RaystreamError: It can't be, and why; the worker has ended.
        """
        ...

    def abandon(self) -> None:
        """Fail all requests and pings and accept no more, while the current work hangs."""
        ...

    def stop(self) -> None:
        """Stop; unfinished requests fail."""
        ...
