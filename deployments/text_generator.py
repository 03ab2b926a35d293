"""TextGenerator: the engine behind a streaming method, as a Serve deployment.

A replica is one process with one model on one device, or on a share of one. What arrives together
is tokenized together (`@serve.batch`) and handed to the engine (`deployments.async_engine`), whose
deltas leave in lists. A stream that is closed aborts its sequence.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from uuid import uuid4

from ray import serve

from deployments.admission import Admission, AdmissionLimits, Permit
from deployments.answer_length import with_default_length
from deployments.assigned_device import open_assigned_device
from deployments.async_engine import MAX_MESSAGES_PER_S, AsyncEngine
from deployments.contract import (
    Accepted,
    ChatMessage,
    GenerationEvent,
    GenerationRequest,
    InvalidParameterError,
    ModelDescription,
    Refused,
    SamplingParams,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.description import describe_model
from deployments.engine.engine import Engine
from deployments.engine.engine_limits import InvalidSequenceError, SequenceTooLongError
from deployments.engine.engine_stats import EngineStats
from deployments.engine.output import TextDelta
from deployments.engine.sequence import SequenceRequest
from deployments.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
)
from deployments.gpu.budget import KVPlan
from deployments.gpu.device import MemoryDevice
from deployments.metrics import ReplicaMetrics, StreamClock
from deployments.model_spec import ModelSpec
from deployments.placed_engine import log_plan, place_engine
from deployments.prompt_encoder import EncodedPrompt, PromptEncoder
from deployments.user_config import BATCH_KEYS, given_settings, queue_limits, set_batching
from deployments.work_line import WorkLine

MAX_NUM_TOKEN_CALLS = 256
"""Prompts that wait to be tokenized for their own sake: they pass by the admission."""

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.002

USER_CONFIG_KEYS = BATCH_KEYS | {"max_messages_per_s"}


class TextGenerator:
    """Generates text with one model."""

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_assigned_device,
    ) -> None:
        """Load the model, plan its memory and warm it up.

        Args:
            spec: The model.
            open_device: Finds the device.

        Raises:
            UnsupportedModelError: The model can't be served; one line says why.
            DeviceMemoryError: The share of the device is too small.
        """
        started = time.monotonic()
        self._spec = spec
        self._device = open_device(spec)
        self._engine = AsyncEngine(self._place_engine, self._observe)
        self._engine.start()
        loaded = self._placed.loaded
        self._encoder = PromptEncoder(loaded.tokenizer, loaded.processor)
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        # The tokenizer's one thread; prompts that are to be answered don't wait for this line.
        self._token_line = WorkLine(self._encoding, 1, MAX_NUM_TOKEN_CALLS, "prompts")
        self._replica_id = uuid4().hex
        self._admission = Admission(
            AdmissionLimits(self.plan.num_slots, spec.max_queued_requests, spec.max_queued_tokens)
        )
        # A thread of its own: the largest grammars would hold up everybody's prompts.
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._metrics = ReplicaMetrics(self.plan.num_slots)
        self._description = describe_model(spec, loaded, self._encoder.template)
        log_plan(self._placed, spec, self._device, time.monotonic() - started)

    def _place_engine(self) -> Engine:
        """Make the engine; runs on the engine's thread."""
        self._placed = place_engine(self._spec, self._device)
        return self._placed.engine

    def _observe(self, stats: EngineStats) -> None:
        self._metrics.observe_engine(stats)

    @property
    def plan(self) -> KVPlan:
        """How the share of the device is spent."""
        return self._placed.plan

    async def describe(self) -> ModelDescription:
        """Return what this replica serves."""
        return self._description

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens; see `PromptEncoder.tokenize`."""
        return await self._token_line.run(self._encoder.tokenize, request)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of tokens; see `PromptEncoder.detokenize`."""
        return await self._token_line.run(self._encoder.detokenize, token_ids)

    def reconfigure(self, user_config: Mapping[str, float | None]) -> None:
        """Set how requests are coalesced and answers gathered, and how much may wait.

        Args:
            user_config: `max_batch_size`, the most requests that are tokenized in one call;
                `batch_wait_timeout_s`, how long the first of them waits for others;
                `max_messages_per_s`, over which the streams gather their tokens; and
                `max_queued_requests` and `max_queued_tokens`, in place of the model entry's.
        """
        given = given_settings(user_config, USER_CONFIG_KEYS)
        self._engine.max_messages_per_s = given.get("max_messages_per_s", MAX_MESSAGES_PER_S)
        self._admission.set_limits(*queue_limits(given, self._spec))
        set_batching(self._encode, given, MAX_BATCH_SIZE, BATCH_WAIT_TIMEOUT_S)

    async def check_health(self) -> None:
        """Raise unless the engine has made steps since the last call, or makes one now.

        Raises:
            EngineDeadError: The engine's thread has ended; Serve replaces the replica.
        """
        await self._engine.check_health()

    async def ping(self) -> None:
        """Wait until the engine has made a step; an idle one gets a token to run.

        Raises:
            RaystreamError: The engine is not well.
        """
        await self._engine.ping()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[GenerationEvent]]:
        """Stream lists of events: `Accepted` first, alone, then all deltas ready since the last.

        A full replica gives `Refused` alone. Closing the iterator aborts the sequence.

        Raises:
            RaystreamError: The request was refused or has failed (see `deployments.errors`).
        """
        try:
            with self._admission.permit(request) as permit:
                async with aclosing(self._generate(request, permit)) as events:
                    async for ready in events:
                        yield ready
        except OverloadedError as error:
            is_full = self._admission.is_full
            yield [Refused(error.message, error.retry_after_s or 1, self._replica_id, is_full)]

    async def _generate(
        self, request: GenerationRequest, permit: Permit
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        arrived = time.monotonic()
        encoded = await self._encode(request)
        if isinstance(encoded, RaystreamError):
            raise encoded
        sequence = SequenceRequest(
            self._engine.unique_id(request.request_id),
            encoded.token_ids,
            self._sampling_of(request, len(encoded.token_ids)),
            request.generated_token_ids,
            encoded.model_inputs,
        )
        try:
            self._placed.engine.validate(sequence)
            sequence = await self._compile_grammar(sequence)
        except SequenceTooLongError as error:
            raise ContextLengthExceededError(str(error), _prompt_field(request)) from error
        except InvalidSequenceError as error:
            raise InvalidRequestError(str(error), _prompt_field(request)) from error
        except InvalidParameterError as error:
            raise InvalidRequestError(error.message, error.param) from error
        permit.weigh(self._placed.engine.limits.max_num_tokens(sequence))
        self._metrics.count_prompt(len(encoded.token_ids))
        with self._engine.running(sequence) as gains:
            yield [Accepted(len(encoded.token_ids), self._replica_id)]
            clock = StreamClock(self._metrics, arrived)
            async for deltas in gains:
                clock.observe(deltas)
                yield [TextDelta.join(deltas)]

    def _sampling_of(self, request: GenerationRequest, num_prompt_tokens: int) -> SamplingParams:
        """Return the sampling, with the request's or the model's own length if it names none."""
        generation = self._placed.loaded.model.generation_config
        return with_default_length(
            request.sampling,
            request.default_max_tokens or getattr(generation, "max_new_tokens", None),
            self._spec.max_model_len - num_prompt_tokens,
        )

    @serve.batch(
        max_batch_size=MAX_BATCH_SIZE,
        batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S,
        max_concurrent_batches=16,
    )
    async def _encode(
        self, requests: list[GenerationRequest]
    ) -> list[EncodedPrompt | RaystreamError]:
        """Encode what arrived together, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self._encoder.encode, requests)

    async def _compile_grammar(self, sequence: SequenceRequest) -> SequenceRequest:
        """Prepare a sequence for its grammar, if it has one, where that delays no step.

        Raises:
            InvalidParameterError: The grammar can't be used.
        """
        if sequence.params.grammar is None:
            return sequence
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compiling, self._placed.engine.compile_grammar, sequence
        )

    def __del__(self) -> None:
        """End the engine's thread when Serve lets the replica go."""
        # What `__init__` did not reach is not there.
        if hasattr(self, "_engine"):
            self._engine.stop()
        if hasattr(self, "_encoding"):
            self._encoding.shutdown(wait=False)
        if hasattr(self, "_compiling"):
            self._compiling.shutdown(wait=False)


def _prompt_field(request: GenerationRequest) -> str:
    """Return the name of the field that the prompt came in."""
    is_chat = any(isinstance(part, ChatMessage) for part in request.prompt)
    return "messages" if is_chat else "prompt"
