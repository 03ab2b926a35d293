"""Continuous batching: sequences join and leave while others run.

Owns the sequences, the KV memory and the order of a step: schedule, run, sample, detokenize. Not
thread-safe: one thread owns an engine (`deployments.engine.engine_thread`).

`validate` refuses a sequence that can't be served, before it is admitted. An error in the model,
the sampler or the detokenizer ends only the sequence that caused it. When memory runs short, steps
get smaller and the newest sequences wait. Any other error is a bug in this code and is raised; the
engine must not be used after it.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from deployments.compute.device_errors import is_fatal, is_out_of_memory, release_cache
from deployments.compute.host_memory import trim_freed_memory
from deployments.compute.sdpa import disable_cudnn_attention
from deployments.compute.speedups import (
    can_attend_rows,
    find_store,
    has_kernels,
    open_weights,
)
from deployments.compute.token_budget import TokenBudget
from deployments.compute.work_watch import max_work_s
from deployments.contract.output import EngineStats, FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.varlen_reads import (
    describe_reads,
    find_obstacle,
    find_row_attention,
)
from deployments.engine.detokenizing.detokenizers import Deltas, Detokenizers, NewToken
from deployments.engine.grammar.matcher import GrammarCompiler
from deployments.engine.idle_memory import IdleMemory
from deployments.engine.invariants import check_invariants
from deployments.engine.limits import EngineLimits, InvalidSequenceError
from deployments.engine.model.loader import LoadedModel
from deployments.engine.model.runner import ModelRunner, StepLogits
from deployments.engine.model.support import check_layers, check_length
from deployments.engine.recovery.sampling_recovery import sample_step
from deployments.engine.recovery.step_recovery import OUT_OF_MEMORY, Row, StepOutcome, StepRecovery
from deployments.engine.replay.cuda_capture import open_capturer
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.logprobs import PromptScores
from deployments.engine.sampling.sampler import Sampled, waits_for_reads
from deployments.engine.scheduling.scheduler import DecodeRow, Scheduler, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceEvent, SequenceRequest
from deployments.engine.scheduling.step_pace import StepPace

logger = logging.getLogger(__name__)

UNDECODABLE = "the tokens of this sequence can't be decoded to text"

MAX_SCORED_LOGITS = 2**24
"""Logits of a step that are computed only for the log-probabilities of prompts: 64 MiB in float32,
64 rows of a vocabulary of 262,144 tokens."""


class Engine:
    """Runs many sequences on one model.

    Attributes:
        limits: How many sequences and tokens it holds.
        layout: The KV memory.
        attention: How its attention reads the KV memory, in words.
        max_step_s: Seconds after which a step can only hang.
        deliver: Takes most deltas of the step before while a step runs, if the device runs steps by
            itself. Without it, each step returns all its deltas.
    """

    def __init__(self, loaded: LoadedModel, limits: EngineLimits) -> None:
        """Reserve the KV memory.

        Args:
            loaded: The model and its tokenizer.
            limits: How many sequences and tokens to hold.

        Raises:
            UnsupportedModelError: The model has fewer positions than a sequence may have tokens.
        """
        check_length(loaded.text_config, limits.max_model_len)
        self.limits = limits
        self.max_step_s = max_work_s(
            loaded.num_weight_bytes,
            max(limits.max_batched_tokens, limits.max_num_seqs),
            loaded.model.device.type,
        )
        self._text_config = loaded.text_config
        self._detokenizers = Detokenizers(loaded.tokenizer)
        self._vocab_size: int = loaded.text_config.vocab_size
        # Some configurations name ids beyond the vocabulary; the sampler could not bar those.
        self._eos_token_ids = frozenset(i for i in loaded.eos_token_ids if i < self._vocab_size)
        self._grammars = GrammarCompiler(loaded.tokenizer, self._vocab_size, self._eos_token_ids)
        model = self._model = loaded.model
        shape = KVShape.of(loaded.text_config, model.dtype)
        self.layout = limits.layout(shape.group_capacities(limits.max_model_len))
        on_kernels = has_kernels(model.device)
        attends_in_place = on_kernels and can_attend_rows(shape.head_dim, shape.dtype)
        obstacle = find_obstacle(shape, loaded.text_config, model.device)
        num_heads, attend_rows = loaded.text_config.num_attention_heads, None
        if obstacle is None:
            attend_rows = find_row_attention(shape, num_heads, model.device)
        self.attention = describe_reads(
            obstacle,
            attends_in_place=attends_in_place,
            has_row_attention=attend_rows is not None,
        )
        if model.device.type == "cuda":
            logger.log(logging.WARNING if obstacle else logging.INFO, self.attention)
        self._kv = KVCache(
            shape,
            self.layout,
            max_model_len=limits.max_model_len,
            device=model.device,
            attends_in_place=attends_in_place,
            reads_by_length=obstacle is None,
            store=find_store(model.device) if obstacle is None else None,
            attend_rows=attend_rows,
        )
        disable_cudnn_attention(model.device)
        capturer = open_capturer(model.device) if limits.cuda_graphs else None
        self._budget = TokenBudget(max(limits.max_batched_tokens, limits.max_num_seqs))
        self._runner = ModelRunner(
            model,
            self._kv,
            limits.max_num_seqs,
            max_batched_tokens=self._budget.max_tokens,
            has_kernels=on_kernels,
            capturer=capturer,
        )
        self._recovery = StepRecovery(
            self._runner.run, model.device, self._kv.full_context_length, self._runner.drop_captured
        )
        self._scheduler = Scheduler(
            self.layout,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=self._budget.max_tokens,
            full_context_length=self._kv.full_context_length,
            prefix_caching=limits.prefix_caching,
            max_scored_rows=max(1, MAX_SCORED_LOGITS // self._vocab_size),
        )
        self._pace = None if limits.max_stall_s is None else StepPace(limits.max_stall_s)
        if self._pace is not None:
            self._scheduler.max_prompt_tokens = self._pace.max_prompt_tokens
        self._token_counts = DeviceCounts.open(model.device)
        self._idle_memory = IdleMemory(self._kv, self._scheduler.table.extents)
        self._sequences: dict[str, Sequence] = {}
        self.deliver: Callable[[Deltas], None] | None = None
        self._new_tokens: list[NewToken] = []
        self._runs_by_itself = waits_for_reads(model.device)
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_preempted = 0
        self._num_resumed = 0
        self._weights = open_weights(model, model.device)

    @property
    def kv_bytes(self) -> int:
        """Bytes that are reserved as KV memory."""
        return self._kv.num_bytes

    @property
    def num_captured(self) -> int:
        """Number of decode steps captured now: CUDA graphs, or programs on a CPU."""
        return self._runner.num_captured

    @property
    def forward(self) -> str:
        """How the forward pass runs, in words."""
        return self._runner.forward

    @property
    def captured(self) -> str | None:
        """What capturing at the start took, in words; None if nothing was captured then."""
        return self._runner.captured

    @property
    def captured_bytes(self) -> int:
        """The device's memory that capturing at the start took; 0 if nothing was captured then."""
        return self._runner.captured_bytes

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    @property
    def stats(self) -> EngineStats:
        """The engine's load and counters."""
        return EngineStats(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._num_steps,
            self._num_prompt_tokens,
            self._num_cached_tokens,
            self._scheduler.table.usage,
            self._num_preempted,
            self._num_resumed,
        )

    def validate(self, request: SequenceRequest) -> None:
        """Refuse a sequence that could not run. Thread-safe: it reads only constant state.

        Raises:
            SequenceTooLongError: Prompt and answer are longer than the model's length.
            InvalidSequenceError: The prompt is empty, or a token id is out of range.
            InvalidParameterError: A parameter names a token id that is out of range.
        """
        self.limits.check(request, self._vocab_size)

    def compile_grammar(self, request: SequenceRequest) -> SequenceRequest:
        """Return the request with a matcher for its grammar and its reasoning, if it needs one.

        Thread-safe: it reads only constant state. May be slow (see `GrammarCompiler.compile`).

        Raises:
            InvalidParameterError: See `GrammarCompiler.compile`.
        """
        params = request.params
        if not params.needs_matcher or request.matcher is not None:
            return request
        matcher = self._grammars.compile(
            params.grammar, request.generated_token_ids, params.reasoning
        )
        return replace(request, matcher=matcher)

    def add(self, request: SequenceRequest) -> None:
        """Add a sequence to the waiting queue.

        A grammar that is not compiled yet is compiled here, which stalls every other sequence.

        Raises:
            InvalidSequenceError: See `validate`; or the engine holds a sequence with this id.
            InvalidParameterError: See `validate` and `compile_grammar`.
        """
        self.validate(request)
        request = self.compile_grammar(request)
        if request.sequence_id in self._sequences:
            raise InvalidSequenceError(f"sequence {request.sequence_id} exists already")
        sequence = Sequence(
            request, max_model_len=self.limits.max_model_len, eos_token_ids=self._eos_token_ids
        )
        self._detokenizers.open(request)
        self._sequences[request.sequence_id] = sequence
        self._num_resumed += request.is_resumed and not request.is_return
        self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> None:
        """End a sequence and free its memory. Do nothing if the sequence has already ended."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def step(self) -> Deltas:
        """Run a step.

        Returns:
            The deltas that `deliver` did not take. A delta with a finish reason is its sequence's
            last: the engine has dropped the sequence.
        """
        assert not self.is_asleep, "its weights are not there"
        started_s = time.perf_counter()
        plan = self._schedule()
        for sequence in plan.admitted:
            _note_begun(sequence)
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._num_cached_tokens += sequence.num_cached_tokens
        outcome = self._recovery.run(plan)
        undecodable: list[Sequence] = []
        deltas = self._tell(self._new_tokens, undecodable)
        self._new_tokens = []
        if self.deliver is not None and deltas:
            self.deliver(deltas)
            deltas = []
        tells_later = self.deliver is not None and self._runs_by_itself
        deltas += self._complete(outcome, undecodable, tells_later=tells_later)
        num_failed = sum(delta.error is not None for _, delta in deltas)
        if len(outcome.ran) + len(outcome.failed) > num_failed:
            self._num_steps += 1
            self._note_pace(plan, time.perf_counter() - started_s)
        return deltas

    def give_back_memory(self) -> float | None:
        """Give a part of the KV memory that has been free for a while back; see `IdleMemory`.

        Returns:
            Seconds after which to call it again even if no step has run; None for never.
        """
        return self._idle_memory.give_back()

    @property
    def is_asleep(self) -> bool:
        """Whether the weights' memory is given back; then no step can run."""
        return self._weights.is_given_back

    @property
    def sleep_level(self) -> int | None:
        """Where the weights are while it sleeps: 1 in pinned host memory, 2 in a file.

        None if that is not decided yet.
        """
        return self._weights.level

    def sleep(self) -> bool:
        """Give back the memory of weights, keys and values; all else stays as it is.

        Retained prefixes are dropped. The traced pass stays, and on a CPU, where tensors keep their
        addresses, so do the captured steps. On a GPU they are dropped, too.

        Returns:
            Whether it sleeps now: not while there is work, nor if the weights find room neither in
            host memory nor on a disk.

        Raises:
            RuntimeError: The device is lost; the engine must not be used any more.
        """
        if self.has_work:
            return False
        if not self.is_asleep:
            try:
                self._weights.give_back()
            except (OSError, RuntimeError) as error:
                if is_fatal(error):
                    raise
                logger.warning("the model can't sleep: its weights can't be written: %s", error)
                return False
            self._scheduler.table.drop_retained()
            if not self._weights.keeps_addresses:
                self._runner.drop_captured()
            self._kv.give_back_all()
            trim_freed_memory()
            release_cache(self._model.device)
        return True

    def wake(self) -> None:
        """Fill the weights' memory again; do nothing if the engine is awake.

        On a GPU, steps that were captured at the start are captured again.

        Raises:
            OSError: They can't be read; the engine must not be used any more.
            RuntimeError: The device has no room, or is lost; the same.
        """
        if not self.is_asleep:
            return
        self._weights.fill()
        self._kv.take_back()
        if not self._weights.keeps_addresses:
            self._runner.prepare()

    def _schedule(self) -> StepPlan:
        """Decide what runs, and prepare the KV memory for it."""
        plan = self._scheduler.schedule()
        for sequence in plan.preempted:
            self._note_preempted(sequence)
        self._kv.apply(plan.copies)
        return plan

    def check(self) -> None:
        """Check the engine's invariants between two steps; for tests and debugging.

        Raises:
            InvariantError: An invariant is broken; the message names it.
        """
        check_invariants(
            sequences=self._sequences,
            detokenized=self._detokenizers.sequence_ids,
            scheduler=self._scheduler,
            budget=self._budget,
        )

    def _complete(
        self, outcome: StepOutcome, undecodable: list[Sequence], *, tells_later: bool
    ) -> Deltas:
        """Turn a step's logits and failures into deltas, and update all sequences.

        Args:
            outcome: The step's outcome.
            undecodable: Sequences of which an earlier token can't be decoded; they end.
            tells_later: Whether tokens that may wait are left for the next step.
        """
        # This must come first: the code below frees the memory of sequences that have ended.
        self._mark_computed(outcome.ran)
        deltas = [self._fail(sequence, why) for sequence, why in outcome.failed]
        tokens: list[NewToken] = []
        for step_logits in outcome.logits:
            deltas += [self._report(*scored) for scored in step_logits.scores]
            if step_logits.sequences:
                deltas += self._sample(step_logits, tokens)
        for sequence in outcome.restarting:
            self._preempt(sequence)
        if tells_later:
            self._new_tokens = [token for token in tokens if token.may_wait]
            tokens = [token for token in tokens if not token.may_wait]
        deltas += self._tell(tokens, undecodable)
        unended = [sequence for sequence in undecodable if sequence.finish_reason is None]
        deltas += [self._fail(sequence, UNDECODABLE) for sequence in unended]
        self._adjust_budget(outcome.num_oom_tokens)
        return deltas

    def _tell(self, tokens: Iterable[NewToken], undecodable: list[Sequence]) -> Deltas:
        """Return the texts of new tokens, and end the sequences that end with them."""
        deltas = self._detokenizers.tell(tokens, undecodable)
        for sequence_id, delta in deltas:
            if delta.finish_reason is not None:
                self._finish(self._sequences[sequence_id], delta.finish_reason)
        return deltas

    def _mark_computed(self, rows: Iterable[Row]) -> None:
        for row in rows:
            sequence = row.sequence
            sequence.has_uncounted_kv = False
            if isinstance(row, DecodeRow):
                sequence.num_computed_tokens += 1
                continue
            sequence.num_computed_tokens = row.end
            if row.end == len(sequence.token_ids):
                sequence.handle(SequenceEvent.PREFILLED)

    def _adjust_budget(self, num_oom_tokens: int) -> None:
        """Shrink the steps after one that ran out of memory; grow them again over time."""
        if num_oom_tokens:
            self._budget.shrink(num_oom_tokens)
        else:
            self._budget.note_good_step()
        self._scheduler.max_step_tokens = self._budget.tokens
        for sequence in self._scheduler.excess:
            self._preempt(sequence)

    def _note_pace(self, plan: StepPlan, seconds: float) -> None:
        """Bound the tokens of prompts in the next step by how long this one took."""
        if self._pace is None:
            return
        self._pace.note(len(plan.decode), plan.num_tokens - len(plan.decode), seconds)
        self._scheduler.max_prompt_tokens = self._pace.max_prompt_tokens

    def _preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the waiting queue; its tokens are recomputed later."""
        self._note_preempted(sequence)
        self._scheduler.preempt(sequence)

    def _note_preempted(self, sequence: Sequence) -> None:
        self._num_preempted += 1
        if sequence.request.journal is not None:
            sequence.request.journal.preempted_ns.append(time.time_ns())
        logger.info(
            "sequence %s is preempted with %d tokens",
            sequence.sequence_id,
            len(sequence.token_ids),
        )

    def _report(self, sequence: Sequence, scores: PromptScores) -> tuple[str, TextDelta]:
        """Report the log-probabilities of a prompt's next tokens."""
        delta = self._detokenizers.describe_prompt(sequence, scores)
        sequence.num_scored_tokens += sum(map(len, delta.prompt_logprobs))
        return sequence.sequence_id, delta

    def _sample(self, step_logits: StepLogits, tokens: list[NewToken]) -> Deltas:
        """Sample the next tokens and append them.

        Args:
            step_logits: The logits.
            tokens: Gets the new tokens.

        Returns:
            The deltas of sequences that end without a token.
        """
        step = sample_step(step_logits, self._token_counts)
        out_of_memory = [sequence for sequence, is_short in step.failed if is_short]
        # A smaller step can't help the only running sequence.
        runs_alone = self._scheduler.num_running == 1
        if out_of_memory and not runs_alone:
            self._budget.shrink(len(step_logits.sequences))
        deltas: Deltas = []
        for sequence, is_short in step.failed:
            if not is_short:
                deltas.append(self._fail(sequence, "the next token could not be sampled"))
            elif runs_alone:
                deltas.append(self._fail(sequence, OUT_OF_MEMORY))
            else:
                self._preempt(sequence)
        for sequence, sampled in step.sampled:
            advanced = self._advance(sequence, sampled)
            if isinstance(advanced, NewToken):
                tokens.append(advanced)
            else:
                deltas.append(advanced)
        return deltas

    def _advance(
        self, sequence: Sequence, sampled: Sampled | None
    ) -> NewToken | tuple[str, TextDelta]:
        """Append a token; return it, or the delta of a sequence that ends without it."""
        if sampled is None:
            why = sequence.grammar_error or "no token can be chosen: the logits are not finite"
            return self._fail(sequence, why)
        if sequence.is_full:  # `max_tokens` is 0: only the prompt was to be computed
            self._finish(sequence, FinishReason.LENGTH)
            delta = TextDelta(
                (),
                "",
                FinishReason.LENGTH,
                num_cached_tokens=sequence.num_cached_tokens,
                begun_s=sequence.begun_s,
            )
            return sequence.sequence_id, delta
        reason = sequence.append(sampled.token_id)
        if sequence.grammar_error is not None:
            return self._fail(sequence, sequence.grammar_error)
        return NewToken(sequence, sampled, reason)

    def _fail(self, sequence: Sequence, error: str) -> tuple[str, TextDelta]:
        self._finish(sequence, FinishReason.ERROR)
        return sequence.sequence_id, TextDelta((), "", FinishReason.ERROR, error)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._scheduler.remove(sequence)
        del self._sequences[sequence.sequence_id]
        self._detokenizers.close(sequence.sequence_id)

    def warm_up(self) -> None:
        """Run a prefill and a decode step, check that each layer reads its keys, trace the model.

        Raises:
            UnsupportedModelError: The model does something that the engine does not support.
            RuntimeError: Memory ran out; see `is_out_of_memory`.
        """
        num_positions = self.limits.max_model_len
        prompt = tuple(range(min(8, self._vocab_size, num_positions - 2))) or (0,)
        num_new = min(2, num_positions - len(prompt))
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        self.add(SequenceRequest("warm-up", prompt, params))
        while self.has_work:
            plan = self._schedule()
            outcome = StepOutcome()
            try:
                outcome.add((*plan.decode, *plan.prefill), self._runner.run(plan))
            except Exception as error:  # third-party model code may raise anything
                if is_out_of_memory(error):
                    raise
                raise UnsupportedModelError(f"the model failed to warm up: {error}") from error
            for _, delta in self._complete(outcome, [], tells_later=False):
                if delta.error == OUT_OF_MEMORY:
                    raise MemoryError(delta.error)
                if delta.error is not None:
                    raise UnsupportedModelError(f"the model failed to warm up: {delta.error}")
        check_layers(self._text_config, self._runner.visited_layers)
        self._runner.trace()


def _note_begun(sequence: Sequence) -> None:
    if sequence.begun_s is not None:  # it was preempted since
        return
    sequence.begun_s = time.monotonic()
    if sequence.request.beginning is not None:
        sequence.request.beginning.note(sequence.num_cached_tokens)
    if sequence.request.journal is not None:
        sequence.request.journal.note_begun(time.time_ns())
