"""TextGenerator: the engine behind a streaming method, as a Serve deployment.

A replica is one process with one model on one device, or on a share of one. What arrives together
is tokenized together (`@serve.batch`) and handed to the engine's thread; after each step all deltas
come back at once and are spread over the streams. A stream that is closed aborts its sequence.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from itertools import count
from typing import Any
from uuid import uuid4

import torch
from ray import serve

from deployments.admission import Admission, AdmissionLimits, Permit
from deployments.answer_length import with_default_length
from deployments.assigned_device import open_assigned_device
from deployments.chat_template import choose_tool_call_format, special_marks
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
from deployments.delta_stream import DeltaStream
from deployments.engine.cpu.allocator import keep_freed_memory
from deployments.engine.cuda.decode_buckets import MAX_GRAPHS
from deployments.engine.engine import Engine
from deployments.engine.engine_limits import (
    EngineLimits,
    InvalidSequenceError,
    SequenceTooLongError,
)
from deployments.engine.engine_thread import Deltas, EngineDeadError, EngineThread
from deployments.engine.memory import memory_demand
from deployments.engine.model_loader import load_model
from deployments.engine.output import FinishReason, TextDelta
from deployments.engine.sequence import SequenceRequest
from deployments.errors import (
    ContextLengthExceededError,
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.fingerprint import system_fingerprint
from deployments.gpu.budget import GIB, plan_kv_slots
from deployments.gpu.device import MemoryDevice, num_compute_threads, num_cores
from deployments.metrics import ReplicaMetrics, StreamClock
from deployments.model_spec import ModelSpec
from deployments.prompt_encoder import EncodedPrompt, PromptEncoder
from deployments.work_line import WorkLine

logger = logging.getLogger("ray.serve")

PROBE = SamplingParams(temperature=0, max_tokens=1)
PROGRESS = TextDelta((), "")

MAX_NUM_TOKEN_CALLS = 256
"""Prompts that wait to be tokenized for their own sake: they pass by the admission."""

USER_CONFIG_KEYS = frozenset(
    {
        "max_batch_size",
        "batch_wait_timeout_s",
        "max_messages_per_s",
        "max_queued_requests",
        "max_queued_tokens",
    }
)

MIN_INTERVAL_S = 0.01
"""A hundred messages a second in one stream: more than a reader or a screen can take in."""

MAX_MESSAGES_PER_S = 500.0
"""Messages to the ingress, over all streams; one costs about half a millisecond of CPU on its way
to the client."""


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
        self._streams: dict[str, DeltaStream] = {}
        self._serial = count()
        self._pings: set[str] = set()
        self._max_messages_per_s = MAX_MESSAGES_PER_S
        self._num_steps_seen = 0
        self._num_steps_spread = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handed_over: deque[tuple[str, TextDelta]] = deque()
        self._is_spreading = False
        self._thread = EngineThread(self._make_engine, self._hand_over)
        self._engine = self._thread.start().result()
        self._encoder = PromptEncoder(self._loaded.tokenizer, self._loaded.processor)
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
        self._description = self._make_description()
        self._log_plan(time.monotonic() - started)

    def _make_engine(self) -> Engine:
        """Build the engine; runs on the engine's thread."""
        spec, device = self._spec, self._device
        keep_freed_memory()
        torch.set_num_threads(num_cores())
        share = spec.num_gpus or 1.0
        device.enforce_share(share)
        total_bytes = device.total_bytes
        self._loaded = load_model(
            spec.source,
            revision=spec.revision,
            dtype=spec.dtype,
            device=device.torch_device,
            quantization=spec.quantization,
        )
        self._num_threads = spec.num_threads or num_compute_threads(self._loaded.num_weight_bytes)
        torch.set_num_threads(self._num_threads)
        is_captured = spec.cuda_graphs and device.torch_device.type == "cuda"
        demand = memory_demand(
            self._loaded,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_batched_tokens=spec.max_batched_tokens,
            max_graphs=MAX_GRAPHS if is_captured else 0,
        )
        self.plan = plan_kv_slots(
            total_bytes=total_bytes,
            share=share,
            demand=demand,
            max_num_seqs=spec.max_num_seqs,
            foreign_bytes=device.foreign_bytes,
        )
        limits = EngineLimits(
            self.plan.num_slots,
            spec.max_model_len,
            spec.max_batched_tokens,
            spec.prefix_caching,
            spec.cuda_graphs,
        )
        engine = Engine(self._loaded, limits)
        engine.warm_up()
        return engine

    def _log_plan(self, seconds: float) -> None:
        logger.info(
            "%s is ready after %.1f s on %s: share %g of the device, %d compute thread(s), %s%s, "
            "%d KV slots of %d tokens, %.3f GiB",
            self._spec.id,
            seconds,
            self._device.name,
            self._spec.num_gpus or 1,
            self._num_threads,
            str(self._loaded.model.dtype).removeprefix("torch."),
            f" with {self._spec.quantization} weights" if self._spec.quantization else "",
            self.plan.num_slots,
            self._spec.max_model_len,
            self.plan.kv_bytes / GIB,
        )

    def _make_description(self) -> ModelDescription:
        generation = self._loaded.model.generation_config
        template = self._encoder.template
        tool_call_format = choose_tool_call_format(self._spec.tool_call_parser, template)
        temperature = getattr(generation, "temperature", None)
        if getattr(generation, "do_sample", None) is False:
            temperature = 0.0
        return ModelDescription(
            id=self._spec.id,
            created=int(time.time()),
            max_model_len=self._spec.max_model_len,
            accepts_images=self._loaded.processor is not None,
            default_sampling=SamplingParams(
                temperature=1.0 if temperature is None else temperature,
                top_k=getattr(generation, "top_k", None) or 0,
                top_p=getattr(generation, "top_p", None) or 1.0,
                min_p=getattr(generation, "min_p", None) or 0.0,
                repetition_penalty=getattr(generation, "repetition_penalty", None) or 1.0,
            ),
            accepts_tools=template.accepts_tools,
            tool_call_format=tool_call_format.name if tool_call_format else None,
            tool_call_token_ids=special_marks(self._loaded.tokenizer, tool_call_format),
            system_fingerprint=system_fingerprint(self._spec),
        )

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
        given = {key: value for key, value in user_config.items() if value is not None}
        unknown = sorted(user_config.keys() - USER_CONFIG_KEYS)
        if unknown:
            raise ValueError(
                f"unknown keys in user_config: {', '.join(unknown)}; "
                f"known are {', '.join(sorted(USER_CONFIG_KEYS))}"
            )
        self._max_messages_per_s = given.get("max_messages_per_s", MAX_MESSAGES_PER_S)
        max_requests = given.get("max_queued_requests", self._spec.max_queued_requests)
        max_tokens = given.get("max_queued_tokens", self._spec.max_queued_tokens)
        self._admission.set_limits(
            int(max_requests), None if max_tokens is None else int(max_tokens)
        )
        batching: Any = self._encode  # `serve.batch` adds setters that its types don't tell of
        if "max_batch_size" in given:
            batching.set_max_batch_size(int(given["max_batch_size"]))
        if "batch_wait_timeout_s" in given:
            batching.set_batch_wait_timeout_s(given["batch_wait_timeout_s"])

    async def check_health(self) -> None:
        """Raise unless the engine has made steps since the last call, or makes one now.

        Raises:
            EngineDeadError: The engine's thread has ended; Serve replaces the replica.
        """
        num_steps = self._thread.stats.num_steps
        if not self._thread.is_alive:
            raise EngineDeadError("the engine's thread has ended")
        if num_steps == self._num_steps_seen:
            await self.ping()
        self._num_steps_seen = self._thread.stats.num_steps

    async def ping(self) -> None:
        """Wait until the engine has made a step; an idle one gets a token to run.

        Raises:
            RaystreamError: The engine is not well.
        """
        probe = SequenceRequest(self._unique_id("ping"), (0,), PROBE)
        self._pings.add(probe.sequence_id)
        try:
            with self._running(probe) as stream:
                await anext(self._read(stream))
        finally:
            self._pings.discard(probe.sequence_id)

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
            self._metrics.count_refusal()
            yield [Refused(error.message, error.retry_after_s or 1, self._replica_id)]

    async def _generate(
        self, request: GenerationRequest, permit: Permit
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        arrived = time.monotonic()
        encoded = await self._encode(request)
        if isinstance(encoded, RaystreamError):
            raise encoded
        sequence = SequenceRequest(
            self._unique_id(request.request_id),
            encoded.token_ids,
            self._sampling_of(request, len(encoded.token_ids)),
            request.generated_token_ids,
            encoded.model_inputs,
        )
        try:
            self._engine.validate(sequence)
            sequence = await self._compile_grammar(sequence)
        except SequenceTooLongError as error:
            raise ContextLengthExceededError(str(error), _prompt_field(request)) from error
        except InvalidSequenceError as error:
            raise InvalidRequestError(str(error), _prompt_field(request)) from error
        except InvalidParameterError as error:
            raise InvalidRequestError(error.message, error.param) from error
        permit.weigh(self._engine.limits.max_num_tokens(sequence))
        self._metrics.count_prompt(len(encoded.token_ids))
        with self._running(sequence) as stream:
            yield [Accepted(len(encoded.token_ids), self._replica_id)]
            clock = StreamClock(self._metrics, arrived)
            async for deltas in self._read(stream):
                clock.observe(deltas)
                yield [TextDelta.join(deltas)]

    def _sampling_of(self, request: GenerationRequest, num_prompt_tokens: int) -> SamplingParams:
        """Return the sampling, with the request's or the model's own length if it names none."""
        generation = self._loaded.model.generation_config
        return with_default_length(
            request.sampling,
            request.default_max_tokens or getattr(generation, "max_new_tokens", None),
            self._spec.max_model_len - num_prompt_tokens,
        )

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002, max_concurrent_batches=16)
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
        return await loop.run_in_executor(self._compiling, self._engine.compile_grammar, sequence)

    @contextmanager
    def _running(self, sequence: SequenceRequest) -> Iterator[DeltaStream]:
        """Run a sequence on the engine; abort it when the reader leaves early.

        Raises:
            ReplicaUnavailableError: The engine's thread has ended.
        """
        stream = self._streams[sequence.sequence_id] = DeltaStream(self._interval_s)
        self._loop = asyncio.get_running_loop()
        try:
            self._thread.add(sequence)
            yield stream
        except EngineDeadError as error:
            raise ReplicaUnavailableError("the engine has ended; try again") from error
        finally:
            del self._streams[sequence.sequence_id]
            if not stream.is_finished:
                with suppress(EngineDeadError):
                    self._thread.abort(sequence.sequence_id)

    async def _read(self, stream: DeltaStream) -> AsyncIterator[list[TextDelta]]:
        """Yield what a sequence gains until it has ended.

        Raises:
            GenerationFailedError: The sequence failed in the engine.
            ReplicaUnavailableError: The engine's thread has ended.
        """
        while not stream.is_finished:
            deltas = await stream.take()
            if deltas[-1].finish_reason is not FinishReason.ERROR:
                yield deltas
                continue
            if deltas[:-1]:
                yield deltas[:-1]
            if not self._thread.is_alive:
                raise ReplicaUnavailableError("the engine has ended; try again")
            raise GenerationFailedError(deltas[-1].error or "the generation failed")

    def _interval_s(self) -> float:
        """Return how long a stream gathers its tokens, so that all together stay in bounds."""
        return max(MIN_INTERVAL_S, len(self._streams) / self._max_messages_per_s)

    def _hand_over(self, deltas: Deltas) -> None:
        """Pass a step's deltas to the event loop; runs on the engine's thread.

        A loop that has not come to those of the steps before gets all in one call.
        """
        self._handed_over += deltas
        if self._loop is None or self._loop.is_closed() or self._is_spreading:
            return
        self._is_spreading = True
        self._loop.call_soon_threadsafe(self._spread)

    def _spread(self) -> None:
        # In this order: what is handed over from here on finds no call on its way, and makes one.
        self._is_spreading = False
        stats = self._thread.stats
        if stats.num_steps > self._num_steps_spread:
            # A busy engine's steps are as good as the probe's own, which may have to wait. They
            # come first: a stream's last delta must stay the last.
            for name in self._pings:
                self._streams[name].put(PROGRESS)
        self._num_steps_spread = stats.num_steps
        while self._handed_over:
            sequence_id, delta = self._handed_over.popleft()
            stream = self._streams.get(sequence_id)
            if stream is not None:
                stream.put(delta)
        self._metrics.observe_engine(stats)

    def _unique_id(self, name: str) -> str:
        """Return a name for a sequence; clients may use a request id twice."""
        return f"{name}-{next(self._serial)}"

    def __del__(self) -> None:
        """End the engine's thread when Serve lets the replica go."""
        # What `__init__` did not reach is not there.
        if hasattr(self, "_thread"):
            self._thread.stop()
        if hasattr(self, "_encoding"):
            self._encoding.shutdown(wait=False)
        if hasattr(self, "_compiling"):
            self._compiling.shutdown(wait=False)


def _prompt_field(request: GenerationRequest) -> str:
    """Return the name of the field that the prompt came in."""
    is_chat = any(isinstance(part, ChatMessage) for part in request.prompt)
    return "messages" if is_chat else "prompt"
