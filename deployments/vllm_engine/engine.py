"""VllmEngine: vLLM's AsyncLLM with the face that a replica asks of its engine.

AsyncLLM's processes are EngineCore and, if the model is divided, a worker for each GPU. Their
outputs come to this process's event loop, one message a step.

vLLM would wake a task for each sequence of a step. Here the collector that it puts a sequence's
outputs into makes the delta at once, and the stat logger, which vLLM calls at the end of a step,
lets the replica send all of them in one message.

vLLM knows of processes that have ended, but not of one that hangs. So a watch looks for progress:
while sequences run, each step tells the stat logger.

`EngineSleep` puts the engine to sleep, on a GPU.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from weakref import WeakValueDictionary

from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from deployments.contract.errors import (
    GenerationFailedError,
)
from deployments.contract.model_spec import ModelSpec
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import InvalidParameterError
from deployments.contract.telemetry.start_progress import StartProgress
from deployments.contract.unsupported_model import UnsupportedModelError, reason_of
from deployments.engine.detokenizing.detokenizer import UndecodableError
from deployments.engine.grammar.matcher import GrammarCompiler
from deployments.engine.scheduling.sequence import Beginning, SequenceRequest
from deployments.generator.text_engine import AnyEngine, EngineFacts, Take
from deployments.replica.start_phases import EndPhase
from deployments.vllm_engine.grammars import envelope, eos_token_ids
from deployments.vllm_engine.logs import EngineLogs
from deployments.vllm_engine.moves import hand_over, unsupported
from deployments.vllm_engine.requests import PROBE, UNDECODABLE, Codec, Deltas
from deployments.vllm_engine.scheduler import begun_in
from deployments.vllm_engine.sleep import EngineSleep, part_on_this_node
from deployments.vllm_engine.start import start_engine
from deployments.vllm_engine.step_figures import StepCounts, StepLogger
from deployments.vllm_engine.watches import LOOK_S, Watch

logger = logging.getLogger("ray.serve.raystream.replica")

ANSWER_S: Final = 1.0
"""Seconds that a health check waits for a ping."""

URGENT: Final = -(2**31)
FIRST: Final = -1
"""Priorities at vLLM, where lower numbers run first and all other sequences have 0."""


class VllmEngine(AnyEngine):
    """Runs sequences on vLLM for the coroutines of one event loop."""

    def __init__(
        self,
        spec: ModelSpec,
        logs: EngineLogs,
        on_stats: Callable[[EngineStats], None],
        end_phase: EndPhase = lambda name: None,
        progress: StartProgress | None = None,
        *,
        on_cpu: bool,
    ) -> None:
        """Prepare the engine; `start` starts it.

        Args:
            spec: The model.
            logs: Where vLLM's processes log.
            on_stats: Called on the event loop after each step, once its deltas are taken.
            end_phase: Notes that a phase of the start has ended.
            progress: Counts what is downloaded.
            on_cpu: Whether the model runs on the CPU.
        """
        super().__init__()
        self._spec = spec
        self._logs = logs
        self._on_stats = on_stats
        self._end_phase = end_phase
        self._progress = progress or StartProgress()
        self._on_cpu = on_cpu
        self._counts = StepCounts()
        self._readers: set[_Reader] = set()
        # By vLLM's name. vLLM may begin with a sequence that has just left, so they are kept for as
        # long as the sequence's run looks at them.
        self._beginnings: WeakValueDictionary[str, Beginning] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch = Watch(on_cpu=on_cpu)
        self._is_hung = False
        self._num_steps_seen = 0
        self._pinging: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> EngineFacts:
        """Start vLLM's processes and wait for them; see `start_engine`."""
        started = start_engine(
            self._spec,
            self._logs,
            self._stat_logger,
            self._progress,
            on_cpu=self._on_cpu,
        )
        self._end_phase("engine")
        self._llm, self._runner, self._facts = started.llm, started.runner, started.facts
        self._sleep = EngineSleep(
            self._spec.id,
            self._llm,
            self._facts.memory.weight_bytes,
            self.require_alive,
            part_on_this_node(self._spec),
        )
        self._adapters = {
            each.id: LoRARequest(each.id, each.number, str(each.folder))
            for each in started.adapters
        }
        self._unloaded = list(self._adapters.values())
        tokenizer, vocab_size = self._facts.tokenizer, self._facts.vocab_size
        # Some configurations name ids beyond the vocabulary; vLLM could not bar those.
        ends = eos_token_ids(self._llm.model_config, tokenizer)
        ends = frozenset(each for each in ends if each < vocab_size)
        self._codec = Codec(tokenizer, ends)
        self._grammars = GrammarCompiler(tokenizer, vocab_size, ends)
        return self._facts

    def _stat_logger(self, config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        return StepLogger(self._note_step)

    def stop(self) -> None:
        """End vLLM's processes; unfinished sequences are aborted."""
        self._is_stopped = True
        if self._watching is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._watching.get_loop().call_soon_threadsafe(self._watching.cancel)
        if hasattr(self, "_llm"):
            self._llm.shutdown(timeout=1)
        self._end_readers()
        self._logs.close()

    @property
    def stats(self) -> EngineStats:
        """The engine's load and counters after its last step."""
        return self._counts.stats

    @property
    def is_alive(self) -> bool:
        """Whether the engine still takes sequences."""
        has_ended = self._is_stopped or self._is_hung or self._sleep.failure is not None
        return not (has_ended or self._llm.errored)

    @property
    def _failed(self) -> str:
        return self._sleep.failure or super()._failed

    async def sleep(self) -> bool:
        """Copy the weights into the host's memory, and give the GPU's back until `wake`.

        Keys, values and retained prefixes are dropped; adapters and captured steps stay. Its health
        is good meanwhile, as long as its processes live; no sequence may be run.

        Returns:
            Whether it sleeps: not while a sequence runs, nor if the host has no room for the
            weights.

        Raises:
            RaystreamError: The engine has failed, or was stopped.
        """
        self.require_alive()
        if self._readers or self._unloaded:
            return False
        return await self._sleep.fall_asleep()

    @property
    def sleep_level(self) -> int | None:
        """Where the weights are while it sleeps; see `EngineSleep.level`."""
        return self._sleep.level

    async def wake(self) -> None:
        """Copy the weights back to the GPU; if that fails, the engine has failed.

        Raises:
            ReplicaUnavailableError: They can't be, and why; or the engine has failed.
            GenerationAbortedError: The engine was stopped.
        """
        self.require_alive()
        await self._sleep.wake()

    def validate(self, request: SequenceRequest) -> None:
        """Refuse a sequence that could not run; see `EngineLimits.check`.

        Raises:
            InvalidParameterError: Also what this runner of vLLM can't do.
        """
        self._facts.limits.check(request, self._facts.vocab_size)
        if request.adapter is not None and request.adapter not in self._adapters:
            raise InvalidParameterError(f"there is no adapter {request.adapter!r}", "model")
        if (what := unsupported(request.params, self._runner)) is not None:
            raise InvalidParameterError(f"this model can't run {what}", "min_tokens")

    def compile_grammar(self, request: SequenceRequest) -> SequenceRequest:
        """Compile a grammar to see that it can be used; EngineCore compiles it again.

        Raises:
            InvalidParameterError: It can't be used.
        """
        params = request.params
        if params.needs_matcher:
            self._grammars.compile(params.grammar, request.generated_token_ids, params.reasoning)
        return request

    async def check_health(self) -> None:
        """Raise unless the engine has run a step since the last call, or answers a ping.

        A ping that is not answered at once is left to the watch.

        Raises:
            ReplicaUnavailableError: A process has ended, or hangs.
            RaystreamError: The engine is broken.
        """
        if not self.is_alive:
            cause = self._logs.last_cause()
            raise self._end_error() from (None if cause is None else RuntimeError(cause.reason))
        if not self._sleep.is_awake:
            return
        await self._load_adapters()
        num_steps = self.stats.num_steps
        if num_steps == self._num_steps_seen:
            ping = self._pinging or asyncio.ensure_future(self.ping())
            self._pinging = ping
            await asyncio.wait({ping}, timeout=ANSWER_S)
        # Also one that was answered only after the last check.
        if self._pinging is not None and self._pinging.done():
            ping, self._pinging = self._pinging, None
            ping.result()
        self._num_steps_seen = self.stats.num_steps

    async def _load_adapters(self) -> None:
        """Load the adapters, if that has not been done: Serve waits for the first health check.

        It can't be done before: AsyncLLM stays with the event loop that asks it first.

        Raises:
            UnsupportedModelError: One can't be loaded.
        """
        while self._unloaded:
            adapter = self._unloaded[0]
            try:
                await self._llm.add_lora(adapter)
            except EngineDeadError as error:
                raise self._end_error() from error
            except Exception as error:
                reason = f"can't load the adapter {adapter.name!r}: {reason_of(error)}"
                raise UnsupportedModelError(reason) from error
            del self._unloaded[0]

    async def ping(self) -> None:
        """Wait until the engine has run a one-token sequence, before all others.

        An engine that sleeps, or changes, sleeps on.

        Raises:
            RaystreamError: The engine is broken.
        """
        if not self._sleep.is_awake:
            self.require_alive()
            return
        probe = SequenceRequest(self.unique_id("ping"), (0,), PROBE)
        answer: asyncio.Future[TextDelta] = asyncio.get_running_loop().create_future()

        def take(delta: TextDelta) -> None:
            if delta.finish_reason is not None and not answer.done():
                answer.set_result(delta)

        with self._run(probe, take, URGENT):
            last = await answer
        if last.finish_reason is FinishReason.ABORT:
            raise self._end_error()
        if last.finish_reason is FinishReason.ERROR:
            raise GenerationFailedError(last.error or "the generation failed")

    @contextmanager
    def running(self, sequence: SequenceRequest, take: Take) -> Iterator[None]:
        """Run a sequence, and abort it if the block ends first; see `TextEngine.running`."""
        self._counts.num_resumed += sequence.is_resumed and not sequence.is_return
        with self._run(sequence, take, FIRST if sequence.goes_first else 0):
            yield

    @contextmanager
    def _run(self, sequence: SequenceRequest, take: Take, priority: int) -> Iterator[None]:
        self.require_alive()
        reader = _Reader(sequence, take)
        if not self._readers:
            self._watch.note_begin()
        self._readers.add(reader)
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._look_for_progress())
        self._spawn(self._begin(reader, priority))
        try:
            yield
        finally:
            self._drop(reader)

    async def _begin(self, reader: "_Reader", priority: int) -> None:
        """Hand a sequence to vLLM, and take its outputs as they are put into its collector."""
        try:
            reader.deltas = Deltas(reader.sequence, self._codec)
            prompt, params = self._to_vllm(reader.sequence)
            collector = await self._add(reader.sequence, prompt, params, priority)
        except Exception as error:  # noqa: BLE001 - it ends this sequence, and no other
            self._fail(reader, error)
            self._on_stats(self.stats)
            return
        reader.request_id = collector.request_id
        if (beginning := reader.sequence.beginning) is not None:
            self._beginnings[collector.request_id] = beginning
        if reader not in self._readers:  # its block has ended meanwhile
            self._abort(reader)
            return
        early = collector.output
        collector.output = None
        collector.put = lambda output: self._take(reader, output)
        if early is not None:
            self._take(reader, early)
            self._on_stats(self.stats)

    def _to_vllm(self, sequence: SequenceRequest) -> tuple[list[int], VllmParams]:
        """Return a sequence's prompt and parameters for vLLM."""
        params = sequence.params
        handed = hand_over(sequence, self._runner, self._facts.limits.max_num_tokens(sequence))
        grammar = None
        if params.needs_matcher:
            text = envelope(params.grammar, sequence.generated_token_ids, params.reasoning)
            grammar = StructuredOutputsParams(grammar=text)
        return handed.prompt_token_ids, VllmParams(
            **self._codec.fields(sequence, handed),
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=grammar,
        )

    async def _add(
        self, sequence: SequenceRequest, prompt: list[int], params: VllmParams, priority: int
    ) -> Any:
        return await self._llm.add_request(
            sequence.sequence_id,
            tokens_input(prompt),
            params,
            lora_request=None if sequence.adapter is None else self._adapters[sequence.adapter],
            priority=priority,
        )

    def _take(self, reader: "_Reader", output: RequestOutput | Exception) -> None:
        """Take a sequence's next output. It raises nothing: vLLM would end all sequences."""
        if reader not in self._readers:
            return
        self.ready_s = time.monotonic()
        try:
            if isinstance(output, Exception):
                raise output
            assert reader.deltas is not None
            for delta in reader.deltas.of(output):
                if delta.finish_reason is not None:
                    self._readers.discard(reader)
                    if not output.finished:  # a stop string
                        self._abort(reader)
                    if delta.finish_reason is FinishReason.ABORT:
                        delta = self._aborted
                _hand_on(reader, delta)
        except Exception as error:  # noqa: BLE001 - see above
            self._fail(reader, error)

    def _fail(self, reader: "_Reader", error: Exception) -> None:
        """End a sequence that has failed; the engine's end is no failure of the sequence."""
        if reader not in self._readers:
            return
        self._readers.discard(reader)
        if isinstance(error, EngineDeadError) or not self.is_alive:
            last = self._aborted
        elif isinstance(error, UndecodableError):
            last = TextDelta((), "", FinishReason.ERROR, UNDECODABLE)
        else:
            logger.warning("%s failed", reader.sequence.sequence_id, exc_info=error)
            why = f"the generation failed: {reason_of(error)}"
            last = TextDelta((), "", FinishReason.ERROR, why)
        self._abort(reader)
        _hand_on(reader, last)

    def _drop(self, reader: "_Reader") -> None:
        if reader in self._readers:
            self._readers.discard(reader)
            self._abort(reader)

    def _abort(self, reader: "_Reader") -> None:
        """Have vLLM drop a sequence; one that it does not have yet is dropped by `_begin`."""
        if reader.request_id is not None and self.is_alive:
            self._spawn(self._llm.abort(reader.request_id, internal=True))

    def _end_readers(self) -> None:
        readers, self._readers = self._readers, set()
        for reader in readers:
            with suppress(Exception):
                reader.take(self._aborted)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self.is_alive:
            logger.warning("a call of vLLM failed", exc_info=error)

    def _note_step(
        self, scheduler: SchedulerStats | None, iteration: IterationStats | None
    ) -> None:
        """Count a step. It raises nothing: vLLM would end all sequences."""
        self._watch.note_progress()
        try:
            if scheduler is not None:
                self._note_begun(begun_in(scheduler))
            self._counts.note(scheduler, iteration)
            self._on_stats(self.stats)
        except Exception:
            logger.exception("a step's figures could not be taken")

    def _note_begun(self, begun: Mapping[str, int]) -> None:
        for request_id, num_cached_tokens in begun.items():
            if (beginning := self._beginnings.get(request_id)) is not None:
                beginning.note(num_cached_tokens)

    async def _look_for_progress(self) -> None:
        """End all sequences once the engine can only hang, so that they go on elsewhere."""
        while not self._is_stopped:
            await asyncio.sleep(LOOK_S)
            if self._readers and self._watch.is_hung():
                self._is_hung = True
                logger.error("%s: a step of the engine hangs", self._spec.id)
                self._end_readers()
                self._on_stats(self.stats)
                return


class _Reader:
    """One sequence that runs; `request_id` is vLLM's own name of it, once it has one."""

    def __init__(self, sequence: SequenceRequest, take: Take) -> None:
        self.sequence = sequence
        self.take = take
        self.deltas: Deltas | None = None
        self.request_id: str | None = None


def _hand_on(reader: _Reader, delta: TextDelta) -> None:
    """Give a reader its delta; what it raises, such as an error of a metric, ends no sequence."""
    try:
        reader.take(delta)
    except Exception as error:  # noqa: BLE001 - the event loop logs it
        context = {"message": f"{reader.sequence.sequence_id}: a delta", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
