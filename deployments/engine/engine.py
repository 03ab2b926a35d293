"""Continuous batching: sequences come and go while the others run.

Owns the sequences, their slots and the order of a step: schedule, run, sample, detokenize. Not
thread-safe: one thread owns an engine (`deployments.engine.engine_thread`).

A sequence that can't be served is refused by `validate`, before it is admitted. One that fails in a
step fails alone, be it in the model, in sampling or when its text is made. Where memory runs short,
the newest sequences wait and steps get smaller. Any other error is a bug of ours and is raised: the
engine must not be used after it.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from deployments.engine.cuda.attention_kernels import leave_out_cudnn
from deployments.engine.cuda.graph_capture import open_capturer
from deployments.engine.detokenizer import UndecodableError
from deployments.engine.engine_limits import EngineLimits, InvalidSequenceError
from deployments.engine.engine_stats import EngineStats
from deployments.engine.grammar import GrammarCompiler
from deployments.engine.invariants import check_invariants
from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.model_check import UnsupportedModelError, check_layers, check_length
from deployments.engine.model_loader import LoadedModel
from deployments.engine.model_runner import ModelRunner, StepLogits
from deployments.engine.output import FinishReason, TextDelta
from deployments.engine.sampler import Sampled
from deployments.engine.sampling_guard import draw
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduler import DecodeRow, Scheduler, StepPlan
from deployments.engine.sequence import Sequence, SequenceEvent, SequenceRequest
from deployments.engine.step_budget import StepBudget
from deployments.engine.step_guard import OUT_OF_MEMORY, Row, StepGuard, StepOutcome
from deployments.engine.transcripts import Transcripts

logger = logging.getLogger(__name__)


class Engine:
    """Runs many sequences on one model."""

    def __init__(self, loaded: LoadedModel, limits: EngineLimits) -> None:
        """Allocate the slots.

        Args:
            loaded: The model and its tokenizer.
            limits: How much to hold.

        Raises:
            UnsupportedModelError: The model has fewer positions than a slot.
        """
        check_length(loaded.text_config, limits.max_model_len)
        self.limits = limits
        self._text_config = loaded.text_config
        self._transcripts = Transcripts(loaded.tokenizer)
        self._vocab_size: int = loaded.text_config.vocab_size
        # Some configurations name ids that the model can't give; min_tokens would bar them.
        self._eos_token_ids = frozenset(i for i in loaded.eos_token_ids if i < self._vocab_size)
        self._grammars = GrammarCompiler(loaded.tokenizer, self._vocab_size, self._eos_token_ids)
        model = loaded.model
        self._kv = KVSlots(
            KVShape.of(loaded.text_config, model.dtype),
            num_slots=limits.num_slots,
            max_model_len=limits.max_model_len,
            device=model.device,
        )
        leave_out_cudnn(model.device)
        capturer = open_capturer(model.device) if limits.cuda_graphs else None
        self._runner = ModelRunner(model, self._kv, capturer)
        self._guard = StepGuard(
            self._runner.run, model.device, self._kv.unwrapped_length, self._runner.drop_graphs
        )
        self._budget = StepBudget(max(limits.max_batched_tokens, limits.num_slots))
        self._scheduler = Scheduler(
            max_num_seqs=limits.num_slots,
            max_batched_tokens=self._budget.max_tokens,
            unwrapped_length=self._kv.unwrapped_length,
            prefix_caching=limits.prefix_caching,
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slots."""
        return self._kv.num_bytes

    @property
    def num_graphs(self) -> int:
        """Decode steps that are captured now; 0 where none can be."""
        return self._runner.num_graphs

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    @property
    def stats(self) -> EngineStats:
        """How busy the engine is."""
        return EngineStats(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._num_steps,
            self._num_prompt_tokens,
            self._num_cached_tokens,
        )

    def validate(self, request: SequenceRequest) -> None:
        """Refuse a sequence that could not run. Reads nothing that changes, so any thread may call.

        Raises:
            SequenceTooLongError: Prompt and answer don't fit into a slot.
            InvalidSequenceError: The prompt is empty, or a token id is out of range.
            InvalidParameterError: A parameter names a token id that is out of range.
        """
        self.limits.check(request, self._vocab_size)

    def compile_grammar(self, request: SequenceRequest) -> SequenceRequest:
        """Return the request with a matcher for its grammar, if it has one.

        Reads nothing that changes, so any thread may call. It can take long.

        Raises:
            InvalidParameterError: See `GrammarCompiler.compile`.
        """
        grammar = request.params.grammar
        if grammar is None or request.matcher is not None:
            return request
        matcher = self._grammars.compile(grammar, request.generated_token_ids)
        return replace(request, matcher=matcher)

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence that `validate` has passed.

        A grammar that was not compiled before is compiled now, while all others wait.

        Raises:
            InvalidSequenceError: See `validate`; or the engine holds one of the same id.
            InvalidParameterError: See `validate` and `compile_grammar`.
        """
        self.validate(request)
        request = self.compile_grammar(request)
        if request.sequence_id in self._sequences:
            raise InvalidSequenceError(f"sequence {request.sequence_id} exists already")
        sequence = Sequence(
            request, max_model_len=self.limits.max_model_len, eos_token_ids=self._eos_token_ids
        )
        self._transcripts.open(request)
        self._sequences[request.sequence_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> None:
        """End a sequence and free its slot; one that has ended already is left alone."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)

    def step(self) -> list[tuple[str, TextDelta]]:
        """Run one step.

        Returns:
            What each sequence gained, by its id. A sequence that ended has its finish reason and
            is forgotten.
        """
        plan = self._schedule()
        for sequence in plan.admitted:
            self._num_prompt_tokens += sequence.num_prompt_tokens
            self._num_cached_tokens += sequence.num_cached_tokens
        outcome = self._guard.run(plan)
        deltas = self._complete(outcome)
        num_failed = sum(delta.error is not None for _, delta in deltas)
        if len(outcome.ran) + len(outcome.blamed) > num_failed:
            self._num_steps += 1
        return deltas

    def _schedule(self) -> StepPlan:
        """Decide what runs, and make the slots ready for it."""
        plan = self._scheduler.schedule()
        self._kv.apply(plan.edits)
        return plan

    def check(self) -> None:
        """Prove that nothing is lost, doubled or left behind; for tests, between two steps.

        Raises:
            InvariantError: Something is broken; the message names it.
        """
        check_invariants(
            sequences=self._sequences,
            transcripts=self._transcripts.sequence_ids,
            scheduler=self._scheduler,
            budget=self._budget,
            kv=self._kv,
        )

    def _complete(self, outcome: StepOutcome) -> list[tuple[str, TextDelta]]:
        """Turn what was computed into tokens and text."""
        # First of all: what follows takes slots from some and moves others.
        self._mark_computed(outcome.ran)
        deltas = [self._fail(sequence, why) for sequence, why in outcome.blamed]
        for due in outcome.logits:
            deltas += self._sample(due)
        for sequence in outcome.restarting:
            self._preempt(sequence)
        self._fit_memory(outcome.num_tokens_too_many)
        return deltas

    def _mark_computed(self, rows: Iterable[Row]) -> None:
        for row in rows:
            sequence = row.sequence
            sequence.has_strays = False
            if isinstance(row, DecodeRow):
                sequence.num_computed_tokens += 1
                continue
            sequence.num_computed_tokens = row.end
            if row.end == len(sequence.token_ids):
                sequence.handle(SequenceEvent.PREFILLED)

    def _fit_memory(self, num_tokens_too_many: int) -> None:
        """Run less after a step that was out of memory, and in time more again."""
        if num_tokens_too_many:
            self._budget.shrink(num_tokens_too_many)
        else:
            self._budget.note_good_step()
        self._scheduler.max_step_tokens = self._budget.tokens
        for sequence in self._scheduler.excess:
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Let a running sequence wait again; its tokens will be computed anew."""
        logger.info(
            "sequence %s waits again with %d tokens", sequence.sequence_id, len(sequence.token_ids)
        )
        self._kv.apply(self._scheduler.preempt(sequence))

    def _sample(self, due: StepLogits) -> list[tuple[str, TextDelta]]:
        drawing = draw(due)
        short = [sequence for sequence, is_out_of_memory in drawing.failed if is_out_of_memory]
        # Whoever runs alone can't be helped by running less.
        is_alone = self._scheduler.num_running == 1
        if short and not is_alone:
            self._budget.shrink(len(due.sequences))
        deltas: list[tuple[str, TextDelta]] = []
        for sequence, is_out_of_memory in drawing.failed:
            if not is_out_of_memory:
                deltas.append(self._fail(sequence, "the next token could not be sampled"))
            elif is_alone:
                deltas.append(self._fail(sequence, OUT_OF_MEMORY))
            else:
                self._preempt(sequence)
        return deltas + [self._advance(sequence, sampled) for sequence, sampled in drawing.drawn]

    def _advance(self, sequence: Sequence, sampled: Sampled | None) -> tuple[str, TextDelta]:
        """Append a token, turn it into text, and end the sequence if it is time."""
        if sampled is None:
            why = sequence.grammar_error or "no token can be chosen: the logits are not finite"
            return self._fail(sequence, why)
        reason = sequence.append(sampled.token_id)
        if sequence.grammar_error is not None:
            return self._fail(sequence, sequence.grammar_error)
        try:
            delta = self._transcripts.write(sequence, sampled, reason)
        except UndecodableError:
            return self._fail(sequence, "the tokens of this sequence make no text")
        if delta.finish_reason is not None:
            self._finish(sequence, delta.finish_reason)
        return sequence.sequence_id, delta

    def _fail(self, sequence: Sequence, error: str) -> tuple[str, TextDelta]:
        self._finish(sequence, FinishReason.ERROR)
        return sequence.sequence_id, TextDelta((), "", FinishReason.ERROR, error)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._kv.apply(self._scheduler.remove(sequence))
        del self._sequences[sequence.sequence_id]
        self._transcripts.close(sequence.sequence_id)

    def warm_up(self) -> None:
        """Run a prefill and a decode step, check that every layer attends over its slots, record.

        Raises:
            UnsupportedModelError: The model does something that the engine does not know.
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
            except Exception as error:  # a foreign model may raise anything
                raise UnsupportedModelError(f"the model failed to warm up: {error}") from error
            for _, delta in self._complete(outcome):
                if delta.error is not None:
                    raise UnsupportedModelError(f"the model failed to warm up: {delta.error}")
        check_layers(self._text_config, self._runner.visited_layers)
        self._runner.record()
