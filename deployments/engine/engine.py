"""Continuous batching: sequences come and go while the others run.

Owns the sequences, their slots and the order of a step: schedule, run, sample, detokenize. Not
thread-safe: one thread owns an engine (`deployments.engine.engine_thread`).

A sequence that can't be served is refused by `validate`, before it is admitted. One that fails in a
step fails alone: the step is run again sequence by sequence, and only the one to blame ends.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from deployments.engine.detokenizer import Detokenizer
from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.model_loader import LoadedModel, UnsupportedModelError, check_length
from deployments.engine.model_runner import ModelRunner, StepLogits
from deployments.engine.output import FinishReason, TextDelta
from deployments.engine.sampler import SamplingRow, sample
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduler import Scheduler, StepPlan
from deployments.engine.sequence import Sequence, SequenceEvent, SequenceRequest

logger = logging.getLogger(__name__)


class InvalidSequenceError(ValueError):
    """The sequence can't be served as it stands."""


class SequenceTooLongError(InvalidSequenceError):
    """Prompt and answer don't fit into a slot."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much an engine holds.

    Attributes:
        num_slots: Sequences that run at once.
        max_model_len: Tokens of prompt and answer together.
        max_batched_tokens: Tokens in one step.
        prefix_caching: Whether sequences share the keys and values of prefixes that they have in
            common. A client can then tell by the time of its first token whether somebody's
            prompt began like its own.
    """

    num_slots: int
    max_model_len: int
    max_batched_tokens: int
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine between two steps.

    Attributes:
        num_running: Sequences that hold a slot.
        num_waiting: Sequences without one.
        num_steps: Steps in which the model ran; one that failed for every sequence is none.
        num_prompt_tokens: Tokens of all prompts that were given a slot.
        num_cached_tokens: How many of those were taken over from other sequences.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of a plan: the part that ran, its logits, and the sequences that failed."""

    ran: StepPlan
    logits: StepLogits | None
    blamed: tuple[Sequence, ...] = ()


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
        self._tokenizer = loaded.tokenizer
        self._eos_token_ids = loaded.eos_token_ids
        self._vocab_size: int = loaded.text_config.vocab_size
        self._num_layers: int = loaded.text_config.num_hidden_layers
        model = loaded.model
        self._kv = KVSlots(
            KVShape.of(loaded.text_config, model.dtype),
            num_slots=limits.num_slots,
            max_model_len=limits.max_model_len,
            device=model.device,
        )
        self._runner = ModelRunner(model, self._kv)
        self._scheduler = Scheduler(
            max_num_seqs=limits.num_slots,
            max_batched_tokens=max(limits.max_batched_tokens, limits.num_slots),
            unwrapped_length=self._kv.unwrapped_length,
            prefix_caching=limits.prefix_caching,
        )
        self._sequences: dict[str, Sequence] = {}
        self._detokenizers: dict[str, Detokenizer] = {}
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slots."""
        return self._kv.num_bytes

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
        """
        num_tokens = len(request.prompt_token_ids) + len(request.generated_token_ids)
        max_model_len = self.limits.max_model_len
        if not request.prompt_token_ids:
            raise InvalidSequenceError("the prompt is empty; give at least one token")
        if num_tokens >= max_model_len:
            raise SequenceTooLongError(
                f"the prompt has {num_tokens} tokens, but the model's length is {max_model_len} "
                "tokens, at least one of them for the answer; shorten the prompt"
            )
        max_tokens = request.params.max_tokens or 0
        if 0 < max_tokens <= len(request.generated_token_ids):
            raise InvalidSequenceError(
                f"max_tokens is {max_tokens}, and as many tokens were generated already"
            )
        if len(request.prompt_token_ids) + max_tokens > max_model_len:
            raise SequenceTooLongError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and max_tokens is "
                f"{max_tokens}, but the model's length is {max_model_len} tokens; shorten the "
                "prompt or lower max_tokens"
            )
        token_ids = (*request.prompt_token_ids, *request.generated_token_ids)
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise InvalidSequenceError(f"token ids must be from 0 to {self._vocab_size - 1}")

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence that `validate` has passed.

        Raises:
            InvalidSequenceError: See `validate`; or the engine holds one of the same id.
        """
        self.validate(request)
        if request.sequence_id in self._sequences:
            raise InvalidSequenceError(f"sequence {request.sequence_id} exists already")
        sequence = Sequence(
            request, max_model_len=self.limits.max_model_len, eos_token_ids=self._eos_token_ids
        )
        detokenizer = Detokenizer(self._decode, request.params.stop)
        detokenizer.feed(request.generated_token_ids)
        self._sequences[request.sequence_id] = sequence
        self._detokenizers[request.sequence_id] = detokenizer
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
        outcome = self._run_guarded(plan)
        if outcome.ran.num_tokens:
            self._num_steps += 1
        return self._complete(outcome)

    def _schedule(self) -> StepPlan:
        """Decide what runs, and make the slots ready for it."""
        plan = self._scheduler.schedule()
        self._kv.apply(plan.edits)
        return plan

    def _run_guarded(self, plan: StepPlan) -> StepOutcome:
        """Run a plan; if that fails, run each of its rows alone and find the ones to blame."""
        try:
            return StepOutcome(plan, self._runner.run(plan))
        except Exception:  # whatever it is, it must end one sequence, not all
            logger.exception("a step failed; running its sequences one by one")
        parts = [StepPlan((row,), ()) for row in plan.decode]
        parts += [StepPlan((), (chunk,)) for chunk in plan.prefill]
        ran: list[StepPlan] = []
        logits: list[StepLogits] = []
        blamed: list[Sequence] = []
        for part in parts:
            try:
                result = self._runner.run_again(part)
            except Exception:  # as above; this is the one to blame
                blamed.append((part.decode or part.prefill)[0].sequence)
                logger.exception("sequence %s failed", blamed[-1].sequence_id)
            else:
                ran.append(part)
                logits += [result] if result is not None else []
        decode = tuple(row for part in ran for row in part.decode)
        prefill = tuple(chunk for part in ran for chunk in part.prefill)
        return StepOutcome(StepPlan(decode, prefill), StepLogits.join(logits), tuple(blamed))

    def _complete(self, outcome: StepOutcome) -> list[tuple[str, TextDelta]]:
        """Turn what was computed into tokens and text."""
        # First of all, since a slot is retained and traded with what was computed.
        self._mark_computed(outcome.ran)
        failed = [self._fail(s, "the model failed on this sequence") for s in outcome.blamed]
        return failed + self._sample(outcome.logits)

    def _mark_computed(self, plan: StepPlan) -> None:
        for row in plan.decode:
            row.sequence.num_computed_tokens += 1
        for chunk in plan.prefill:
            chunk.sequence.num_computed_tokens = chunk.end
            if chunk.end == len(chunk.sequence.token_ids):
                chunk.sequence.handle(SequenceEvent.PREFILLED)

    def _sample(self, due: StepLogits | None) -> list[tuple[str, TextDelta]]:
        if due is None:
            return []
        rows = [SamplingRow(seq.request.params, len(seq.token_ids)) for seq in due.sequences]
        return [
            self._fail(sequence, "the model gave logits that are not finite")
            if token_id is None
            else self._advance(sequence, token_id)
            for sequence, token_id in zip(due.sequences, sample(due.logits, rows), strict=True)
        ]

    def _advance(self, sequence: Sequence, token_id: int) -> tuple[str, TextDelta]:
        """Append a token, turn it into text, and end the sequence if it is time."""
        detokenizer = self._detokenizers[sequence.sequence_id]
        reason = sequence.append(token_id)
        text, is_stopped = "", False
        if reason is not FinishReason.STOP:
            text, is_stopped = detokenizer.feed((token_id,))
        if reason is not None and not is_stopped:
            rest, is_stopped = detokenizer.flush()
            text += rest
        if is_stopped:
            reason = FinishReason.STOP
        if reason is not None:
            self._finish(sequence, reason)
        num_cached_tokens = sequence.num_cached_tokens if sequence.num_new_tokens == 1 else 0
        delta = TextDelta((token_id,), text, reason, num_cached_tokens=num_cached_tokens)
        return sequence.sequence_id, delta

    def _fail(self, sequence: Sequence, error: str) -> tuple[str, TextDelta]:
        self._finish(sequence, FinishReason.ERROR)
        return sequence.sequence_id, TextDelta((), "", FinishReason.ERROR, error)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._kv.apply(self._scheduler.remove(sequence))
        del self._sequences[sequence.sequence_id]
        del self._detokenizers[sequence.sequence_id]

    def _decode(self, token_ids: Collection[int]) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def warm_up(self) -> None:
        """Run a prefill and a decode step, and check that every layer attends over its slots.

        Raises:
            UnsupportedModelError: The model does something that the engine does not know.
        """
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        prompt = tuple(range(min(8, self._vocab_size, self.limits.max_model_len - 2))) or (0,)
        self.add(SequenceRequest("warm-up", prompt, params))
        while self.has_work:
            plan = self._schedule()
            try:
                outcome = StepOutcome(plan, self._runner.run(plan))
            except (ValueError, TypeError, RuntimeError) as error:
                raise UnsupportedModelError(f"the model failed to warm up: {error}") from error
            for _, delta in self._complete(outcome):
                if delta.error is not None:
                    raise UnsupportedModelError(f"the model failed to warm up: {delta.error}")
        silent = set(range(self._num_layers)) - self._runner.visited_layers
        if silent:
            raise UnsupportedModelError(
                f"layers {sorted(silent)} keep their state elsewhere than in keys and values"
            )
