"""What a replica needs of an engine: token ids go in, deltas come out.

All that is above this seam is the same for every engine: the rendering of prompts, admission, the
channels and failover. `deployments.generator.async_engine` is the embedded engine's side of it, and
`deployments.vllm_engine` vLLM's.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from deployments.contract.errors import (
    GenerationAbortedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.kv_layout import KVLayout
from deployments.plan.replica_report import MemoryPlan

Take = Callable[[TextDelta], None]
"""Takes the deltas of one sequence, on the event loop; it must not raise."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine and its model once it has started.

    Attributes:
        tokenizer: With the chat template, if the model has one.
        processor: Prepares images and text; None if no images are taken.
        generation_config: The model's defaults; None if it has none.
        vocab_size: The tokens that the model has embeddings for.
        limits: How many sequences and tokens the engine holds.
        layout: The KV memory.
        memory: How the replica's memory was divided.
        num_parameters: All weights; tied ones count once.
        dtype: Name of the type of the weights, or how they are quantized.
        num_threads: Number of compute threads.
        summary: A short description for the log.
        versions: What texts depend on besides the model's files, by name.
        attention: How attention reads the KV memory, in words; None if the engine does not say.
    """

    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None
    generation_config: GenerationConfig | None
    vocab_size: int
    limits: EngineLimits
    layout: KVLayout
    memory: MemoryPlan
    num_parameters: int
    dtype: str
    num_threads: int
    summary: str
    versions: Mapping[str, str]
    attention: str | None = None


class TextEngine(Protocol):
    """Runs sequences for the coroutines of one event loop.

    Once a step's deltas are taken, it reports its `EngineStats` on the event loop, to a function
    that it was made with.
    """

    @property
    def ready_s(self) -> float:
        """When the delta that is being taken was ready, by the monotonic clock."""
        ...

    def start(self) -> EngineFacts:
        """Start the engine, and wait until it can run sequences.

        Raises:
            UnsupportedModelError: The model can't be served; one line says why.
            DeviceMemoryError: The share of the device is too small.
        """
        ...

    def stop(self) -> None:
        """End the engine; unfinished sequences are aborted."""
        ...

    async def sleep(self) -> bool:
        """Give memory back until `wake`, and return whether it has; no sequence may run meanwhile.

        Raises:
            RaystreamError: The engine is broken, or was stopped.
        """
        ...

    @property
    def sleep_level(self) -> int | None:
        """Where the weights are while it sleeps: 1 in pinned host memory, 2 in a file.

        None for an engine that has never slept, and may not know yet.
        """
        ...

    async def wake(self) -> None:
        """Be ready for sequences again.

        Raises:
            RaystreamError: It can't be, and why; the engine has failed.
        """
        ...

    @property
    def stats(self) -> EngineStats:
        """The engine's load and counters after its last step."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine still takes sequences."""
        ...

    def require_alive(self) -> None:
        """Raise if the engine takes no more sequences.

        Raises:
            GenerationAbortedError: It was stopped.
            ReplicaUnavailableError: It has failed; Serve will replace the replica.
        """
        ...

    async def check_health(self) -> None:
        """Raise unless the engine has run a step since the last call, or can run one.

        Raises:
            Exception: The engine fails. If it hangs, its sequences end.
        """
        ...

    async def ping(self) -> None:
        """Wait until the engine has run a step; an idle engine gets a one-token sequence.

        Raises:
            RaystreamError: The engine is broken.
        """
        ...

    def unique_id(self, name: str) -> str:
        """Return a unique name for a sequence, since clients may repeat a request id."""
        ...

    def validate(self, request: SequenceRequest) -> None:
        """Refuse a sequence that could not run.

        Raises:
            SequenceTooLongError: Prompt and answer are longer than the model's length.
            InvalidSequenceError: The prompt is empty, or a token id is out of range.
            InvalidParameterError: A parameter can't be used with this engine or model.
        """
        ...

    def compile_grammar(self, request: SequenceRequest) -> SequenceRequest:
        """Return the request with its grammar checked, and compiled if that is done here.

        Callable in any thread; may be slow.

        Raises:
            InvalidParameterError: The grammar can't be used.
        """
        ...

    def running(self, sequence: SequenceRequest, take: Take) -> AbstractContextManager[None]:
        """Run a sequence, and abort it if the block ends first.

        Args:
            sequence: The sequence.
            take: Takes its deltas. The last one has a reason: `ABORT` if the engine has ended, so
                that the sequence may go on elsewhere, with an error if the engine has failed; and
                `ERROR` if the sequence itself failed.

        Raises:
            GenerationAbortedError: The engine was stopped.
            ReplicaUnavailableError: The engine has failed.
        """
        ...


class AnyEngine:
    """What every `TextEngine` does in the same way: it names sequences, and says how it has ended.

    Attributes:
        ready_s: When the delta that is being taken was ready, by the monotonic clock.
    """

    def __init__(self) -> None:
        """Start without sequences."""
        self.ready_s = 0.0
        self._is_stopped = False
        self._serial = count()

    @property
    def is_alive(self) -> bool:
        """Whether the engine still takes sequences."""
        raise NotImplementedError

    @property
    def _failed(self) -> str:
        """What clients of its sequences read if it has ended without being stopped."""
        return "the engine has failed; try again"

    def require_alive(self) -> None:
        """Raise if the engine takes no more sequences; see `TextEngine.require_alive`."""
        if not self.is_alive:
            raise self._end_error()

    async def sleep(self) -> bool:
        """Stay awake: not every engine can give its memory back."""
        return False

    @property
    def sleep_level(self) -> int | None:
        """None: it stays awake."""
        return None

    async def wake(self) -> None:
        """Do nothing: it has stayed awake."""

    def unique_id(self, name: str) -> str:
        """Return a unique name for a sequence, since clients may repeat a request id."""
        return f"{name}-{next(self._serial)}"

    def _end_error(self) -> RaystreamError:
        """Return what the engine's end means for a sequence, which may go on elsewhere."""
        if self._is_stopped:
            return GenerationAbortedError("the engine was stopped; try again")
        return ReplicaUnavailableError(self._failed)

    @property
    def _aborted(self) -> TextDelta:
        """The last delta of a sequence that may go on elsewhere, because the engine has ended."""
        return TextDelta((), "", FinishReason.ABORT, None if self._is_stopped else self._failed)
