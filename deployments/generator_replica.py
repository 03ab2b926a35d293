"""GeneratorReplica: an engine behind a streaming method, whatever engine it is.

Requests that arrive together are tokenized together (`@serve.batch`) and handed to the engine
(`deployments.generator.text_engine`). The deltas of all sequences leave by the channels of their
ingresses (`deployments.channel`); Serve's call of a request only accepts it, and ends with it.
Closing that call aborts the sequence.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, aclosing, closing
from dataclasses import replace
from math import inf
from typing import TypeVar, TypeVarTuple

from ray import serve

from deployments.autoscaling import ReplicaLoad
from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.claims import StreamCost
from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import (
    REFUSALS,
    ContextLengthExceededError,
    InvalidRequestError,
    ModelChangedError,
    OverloadedError,
    RaystreamError,
)
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.gen_ai_spans import ModelSpan, end, recorded
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    Started,
    TokenizedPrompt,
    TokenizeRequest,
    Waking,
)
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.output import EngineStats, TextDelta
from deployments.contract.sampling_params import InvalidParameterError, SamplingParams
from deployments.contract.telemetry.metric_table import GENERATOR
from deployments.contract.user_config import queue_limits, set_batching
from deployments.engine.limits import InvalidSequenceError, SequenceTooLongError
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.admission.admission import Admission, AdmissionLimits
from deployments.generator.admission.engine_run import EngineRun
from deployments.generator.admission.permit import Permit
from deployments.generator.context_length import fit_length, prompt_field
from deployments.generator.description import describe_model
from deployments.generator.fingerprint import content_digest, model_folder, system_fingerprint
from deployments.generator.image_prompts import ImagePrompts, has_images
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from deployments.generator.text_engine import EngineFacts, TextEngine
from deployments.plan.replica_report import MAX_REPORTED_TENANTS, Waits, WorkCounts
from deployments.replica.metrics import GeneratorMetrics, StreamClock
from deployments.replica.model_replica import ModelReplica
from deployments.replica.probation import Probation

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_NUM_TOKEN_CALLS = 256
"""The most calls of `tokenize` and `detokenize` in progress; admission does not count them."""

OTHER_VERSION = (
    "The model was replaced by another version before the answer was finished. Send the request "
    "again."
)

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.0

MAX_BRIEF_CHARACTERS = 4096
"""About a millisecond of rendering and tokenizing, for which the event loop stands still."""


class GeneratorReplica(ModelReplica):
    """Generates text with one model; a subclass opens the engine that runs it."""

    _table = GENERATOR
    _facts: EngineFacts
    _engine: TextEngine
    _metrics: GeneratorMetrics

    def _open_engine(self) -> TextEngine:
        """Return the engine, not started; its stats go to `_observe`."""
        raise NotImplementedError

    def _start(self) -> None:
        turn = self._own_turn()
        self._engine = self._open_engine()
        digest = self._digest_folder()
        facts = self._facts = self._engine.start()
        content = content_digest(model_folder(self._spec)) if digest is None else digest.result()
        fingerprint = self._fingerprint = system_fingerprint(content, facts.versions)
        self._encoder = PromptEncoder(
            facts.tokenizer,
            facts.processor,
            self._spec.entry.reasoning_parser,
            vocab_size=facts.vocab_size,
            max_model_len=facts.limits.max_model_len,
        )
        self._images = ImagePrompts(self._encoder, max_num_calls=MAX_NUM_TOKEN_CALLS)
        # Calls of `tokenize` queue here, so that prompts to be answered don't wait for them.
        self._token_executor = BoundedExecutor(self._encoding, 1, MAX_NUM_TOKEN_CALLS, "prompts")
        self._admission = Admission(
            AdmissionLimits(self.max_num_seqs, *self._queue_limits({})),
            facts.layout,
            priority_aging_s=self._spec.priority_aging_s,
        )
        self._suspects = asyncio.Lock()
        # A separate thread: a large grammar would otherwise delay every prompt.
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._metrics = GeneratorMetrics(self._store, self._spec.id)
        self._sleeper = self._open_sleeper(
            self._engine, turn, self._admission.park_all, self._admission.abort_all
        )
        described = describe_model(
            self._spec,
            facts.tokenizer,
            facts.generation_config,
            facts.limits.max_model_len,
            self._encoder,
            fingerprint,
        )
        self._description = replace(described, footprint=self._footprint)

    def _digest_folder(self) -> Future[str] | None:
        """Read a folder's files while they are loaded; a hub's are named by their content."""
        if not os.path.isabs(self._spec.source):
            return None
        return self._encoding.submit(content_digest, model_folder(self._spec))

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at once."""
        return self._facts.limits.max_num_seqs

    def _observe(self, stats: EngineStats) -> None:
        self._channels.flush()
        self._metrics.observe_engine(self._with_those_outside(stats))
        self._metrics.observe_waits(self._waits)

    def _with_those_outside(self, stats: EngineStats) -> EngineStats:
        """Return the engine's stats, with the sequences that wait to go into it."""
        return replace(stats, num_waiting=stats.num_waiting + self._admission.num_outside)

    @property
    def _load(self) -> ReplicaLoad:
        admission = self._admission
        most = admission.limits.max_num_seqs
        return ReplicaLoad(
            running=admission.num_running / most,
            waiting=admission.num_waiting / most,
            refused=min(1.0, admission.num_refused / most),
            recent=self._was_used,
            kv_usage=self._engine.stats.kv_usage,
            waiting_tokens=admission.num_waiting_tokens,
            awake=float(self._sleeper.is_ready),
        )

    @property
    def _work(self) -> WorkCounts:
        stats = self._with_those_outside(self._engine.stats)
        return WorkCounts(
            stats.num_running,
            stats.num_waiting,
            stats.kv_usage,
            stats.num_preempted,
            stats.num_resumed,
            stats.num_prompt_tokens,
            stats.num_cached_tokens,
            waits=self._waits,
            tenants=self._admission.of_tenants(MAX_REPORTED_TENANTS),
        )

    @property
    def _waits(self) -> Waits:
        return self._admission.waits

    async def describe(self) -> ModelDescription:
        """Return the description of this replica's model."""
        return self._description

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt | Refused:
        """Return a prompt's tokens; see `PromptEncoder.tokenize`."""
        return await self._run_tokenizer(
            self._encoder.tokenize, request, has_images=self._has_images(request)
        )

    async def detokenize(self, token_ids: tuple[int, ...]) -> str | Refused:
        """Return the text of tokens; see `PromptEncoder.detokenize`."""
        return await self._run_tokenizer(self._encoder.detokenize, token_ids)

    async def _run_tokenizer(
        self, work: Callable[[*Ts], T], *args: *Ts, has_images: bool = False
    ) -> T | Refused:
        self._note_use()
        executor = self._images if has_images else self._token_executor
        try:
            return await executor.run(work, *args)
        except REFUSALS as error:
            return Refused(error, self._replica_id)

    def _apply(self, given: Mapping[str, float]) -> None:
        self._admission.set_limits(*self._queue_limits(given))
        set_batching(self._encode, given, MAX_BATCH_SIZE, BATCH_WAIT_TIMEOUT_S)

    def _queue_limits(self, given: Mapping[str, float]) -> tuple[int, int | None]:
        return queue_limits(given, self._spec.entry, self._facts.limits.max_model_len)

    @property
    def _sleep_level(self) -> int | None:
        return self._engine.sleep_level

    async def _check_health(self) -> None:
        self._sleeper.watch()  # nobody may have used the model since its start
        self._deep_sleep.look(self._sleeper)
        self._sleeper.wake_if_kept()
        await self._engine.check_health()

    @property
    def _is_dead(self) -> bool:
        return not self._engine.is_alive

    async def ping(self) -> None:
        """Wait until the engine has run a step; an idle engine gets a one-token sequence.

        Raises:
            RaystreamError: The engine is broken.
        """
        await self._engine.ping()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[GenerationEvent]]:
        """Yield `Accepted` in a list of its own, and end when the sequence has ended.

        Before it, `Waking` comes from time to time while the model wakes from a light sleep. Deltas
        go to `request.stream`. A suspect waits for its turn, and gets `Started`, also in a list of
        its own; it ends with that if its ingress gives no go-ahead. A replica that does
        not run the request yields `Refused` in place of `Accepted`. Closing the iterator aborts the
        sequence.

        Raises:
            RaystreamError: The request has failed, and not by its client's fault.
        """
        self._note_use()
        arrived_s = time.monotonic() - request.elapsed_s
        with recorded(None if self._spans is None else self._spans.of_text(request)) as span:
            if request.fingerprint not in (None, self._fingerprint):
                changed = ModelChangedError(OTHER_VERSION, None, 1)
                end(span, changed)
                yield [Refused(changed, self._replica_id)]
                return
            try:
                with self._admission.permit(request) as permit, ExitStack() as held:
                    use = held.enter_context(self._sleeper.in_use())
                    async for waited_s in self._sleeper.waking(use):
                        yield [Waking(self._spec.id, waited_s, self._replica_id)]
                    if request.num_deaths:
                        # Otherwise it could be blamed for a death while it waits.
                        await permit.wait_for_turn()
                    async with Probation(self._suspects, request.num_deaths) as probation:
                        if probation.is_on:
                            self._engine.require_alive()
                            with self._channels.go_aheads.expect() as go_ahead:
                                yield [Started(await self._channels.address(), go_ahead.number)]
                                if not await go_ahead.is_given():
                                    return
                        async with aclosing(
                            self._generate(request, arrived_s, permit, probation, span, held)
                        ) as events:
                            async for ready in events:
                                yield ready
            except REFUSALS as error:
                end(span, error)
                is_full = isinstance(error, OverloadedError) and self._admission.is_full
                yield [Refused(error, self._replica_id, is_full)]

    async def _generate(
        self,
        request: GenerationRequest,
        arrived_s: float,
        permit: Permit,
        probation: Probation,
        span: ModelSpan | None,
        held: ExitStack,
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        if self._has_images(request):
            encoded = await self._images.encode(request, held)
        else:
            encoded = await self._encode(request)
        if isinstance(encoded, RaystreamError):
            raise encoded
        try:
            sequence = SequenceRequest(
                self._engine.unique_id(request.request_id),
                encoded.token_ids,
                _after(encoded.reasoning, self._sampling_of(request, len(encoded.token_ids))),
                request.generated_token_ids,
                encoded.model_inputs,
                is_resumed=request.is_resumed,
                journal=None if span is None else span.journal,
                num_prompt_logprobs=request.num_prompt_logprobs,
                adapter=request.adapter,
            )
            self._engine.validate(sequence)
            sequence = await self._compile_grammar(sequence)
        except SequenceTooLongError as error:
            raise ContextLengthExceededError(str(error), prompt_field(request)) from error
        except InvalidSequenceError as error:
            raise InvalidRequestError(str(error), prompt_field(request)) from error
        except InvalidParameterError as error:
            raise InvalidRequestError(error.message, error.param) from error
        limits = self._facts.limits
        self._admission.weigh(
            permit, limits.max_num_tokens(sequence), limits.num_planned_tokens(sequence)
        )
        num_tokens = len(encoded.token_ids)
        if not request.is_resumed:  # else the replica that it has left has counted it
            self._metrics.count_prompt(num_tokens)
        channel = await self._channels.address()
        assert request.stream is not None, "each call says where its deltas go"
        clock = StreamClock(
            self._metrics,
            arrived_s=arrived_s,
            num_prompt_tokens=num_tokens,
            num_given_tokens=len(request.generated_token_ids),
        )
        costs = StreamCost(0 if request.generated_token_ids else num_tokens)
        with self._channels.stream(request.stream) as stream:

            def take(delta: TextDelta) -> None:
                stream.put(delta)  # first, so that no error of a metric loses it
                probation.gained(len(delta.token_ids))
                clock.observe(delta, self._engine.ready_s)
                self._admission.charge(permit, costs.of([delta]))
                if span is not None:
                    span.gained(delta)

            if span is not None:
                span.accepted(num_tokens)
            self._engine.require_alive()
            run = EngineRun(
                self._engine,
                request,
                sequence,
                take,
                flush=self._channels.flush,
                on_begun=lambda: self._admission.note_begun(permit),
                on_late=lambda: self._admission.park_late(permit),
            )
            with closing(run), self._admission.turns(permit, run):
                yield [
                    Accepted(
                        num_tokens,
                        self._replica_id,
                        encoded.reasoning,
                        channel,
                        self._fingerprint,
                        encoded.digest,
                        self._phases.total_s,
                    )
                ]
                await stream.wait_until_ended()

    def _sampling_of(self, request: GenerationRequest, num_prompt_tokens: int) -> SamplingParams:
        """Return the sampling with a length that fits; see `fit_length`."""
        generation = self._facts.generation_config
        return fit_length(
            request,
            num_prompt_tokens,
            request.default_max_tokens or getattr(generation, "max_new_tokens", None),
            self._facts.limits.max_model_len,
        )

    @serve.batch(
        max_batch_size=MAX_BATCH_SIZE,
        batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S,
        max_concurrent_batches=2,
    )
    async def _encode(
        self, requests: list[GenerationRequest]
    ) -> list[EncodedPrompt | RaystreamError]:
        """Encode requests that arrived together, off the event loop unless that takes longer."""
        # A processor of images may set up the tokenizer again while it runs on the other thread.
        if self._facts.processor is None and are_brief(requests):
            return self._encoder.encode(requests)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self._encoder.encode, requests)

    def _has_images(self, request: GenerationRequest | TokenizeRequest) -> bool:
        """Return whether the model has to read images for a request."""
        return self._facts.processor is not None and has_images(request.prompt)

    async def _compile_grammar(self, sequence: SequenceRequest) -> SequenceRequest:
        """Compile a sequence's grammar, if it has one, off the event loop and the engine's thread.

        Raises:
            InvalidParameterError: The grammar can't be used.
        """
        if not sequence.params.needs_matcher:
            return sequence
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compiling, self._engine.compile_grammar, sequence)

    def _stop(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.stop()
        if hasattr(self, "_images"):
            self._images.close()
        if hasattr(self, "_compiling"):
            self._compiling.shutdown(wait=False)


def _after(prompt: PromptReasoning, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling with the reasoning that the end of the prompt leaves possible."""
    tokens = sampling.reasoning
    if tokens is None or prompt is PromptReasoning.OPEN:
        return sampling
    has_ended = prompt is PromptReasoning.ENDED
    return replace(sampling, reasoning=None if has_ended else replace(tokens, has_begun=True))


def are_brief(requests: Iterable[GenerationRequest]) -> bool:
    """Return whether encoding all these prompts takes about a millisecond at most.

    On a busy machine a change of threads and back takes longer: each thread waits for a core and
    for Python's lock.
    """
    return sum(map(_num_characters, requests)) <= MAX_BRIEF_CHARACTERS


def _num_characters(request: GenerationRequest) -> float:
    """Return the length of a prompt's text; infinity for more than text."""
    if request.tools or request.template_kwargs:
        return inf
    if isinstance(request.prompt, str):
        return len(request.prompt)
    return sum(map(_num_characters_of_part, request.prompt))


def _num_characters_of_part(part: ChatMessage | int) -> float:
    if isinstance(part, int):
        return 1  # a token id is not encoded, only copied
    if part.tool_calls or part.reasoning_content:
        return inf
    return sum(len(each.text) if isinstance(each, TextPart) else inf for each in part.parts)
