"""Runs the model once for each step.

Decode rows and chunks of text prompts are packed into a single row [1, n]. Prompts with images go
through the model's stock forward pass one by one, and their cache is copied into their extents.

A step of decode rows only is replayed if the device supports that (`DecodeReplay`).

A failed step may be run again in parts: the same tokens write the same keys and values to the same
places. The exception is a layer that holds only its window: a chunk's end may have overwritten
tokens that its beginning sees. Step recovery restarts such a sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from deployments.compute.host_to_device import to_device
from deployments.compute.speedups import is_single_row_exact
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.model.forward import Forward, StockForward
from deployments.engine.model.support import is_multi_axis
from deployments.engine.model.traced_forward import TracedForward, trace
from deployments.engine.replay.cuda_capture import GraphCapturer
from deployments.engine.replay.cuda_replay import CudaDecodeReplay
from deployments.engine.sampling.logprobs import PromptScores, score_prompt
from deployments.engine.scheduling.scheduler import PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence
from deployments.plan.graph_sizes import MAX_GRAPHS

if TYPE_CHECKING:
    from deployments.engine.replay.decode_replay import DecodeReplay

STOCK_ATTENTION = "sdpa"
"""The attention implementation that prefills prompts with images."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The logits of the sequences whose next token is due.

    Attributes:
        sequences: The n sequences.
        logits: [n, vocab], float32, on the model's device.
        scores: Sequences whose prompts' log-probabilities are wanted, each with those of its
            prompt's next tokens.
    """

    sequences: tuple[Sequence, ...]
    logits: torch.Tensor
    scores: tuple[tuple[Sequence, PromptScores], ...] = ()

    @classmethod
    def join(cls, parts: list["StepLogits"]) -> "StepLogits | None":
        """Join several into one; return None for an empty list."""
        if len(parts) < 2:
            return parts[0] if parts else None
        sequences = tuple(sequence for part in parts for sequence in part.sequences)
        scores = tuple(each for part in parts for each in part.scores)
        return cls(sequences, torch.cat([part.logits for part in parts]), scores)


class _TrimmedCache(DynamicCache):
    """A cache of which a layer with a window holds no more memory than its window takes.

    transformers' own keeps a view of all tokens.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's tokens; return all that its queries see."""
        seen: tuple[torch.Tensor, torch.Tensor]
        seen = super().update(key_states, value_states, layer_idx, *others)
        layer = self.layers[layer_idx]
        assert isinstance(layer, CacheLayerMixin)
        assert layer.keys is not None
        assert layer.values is not None
        if layer.keys.shape[-2] < key_states.shape[-2]:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return seen


class ModelRunner:
    """Runs step plans on a model whose language model attends over a KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVCache,
        max_num_seqs: int,
        *,
        max_batched_tokens: int,
        has_kernels: bool,
        capturer: GraphCapturer | None = None,
    ) -> None:
        """Run `model`, whose language model attends over `kv`, on its device.

        Args:
            model: The model.
            kv: The KV cache.
            max_num_seqs: The most decode rows of a step.
            max_batched_tokens: The most tokens of a step.
            has_kernels: Whether the device runs our kernels.
            capturer: Captures decode steps as graphs; None if that is impossible.
        """
        self._model = model
        self._kv = kv
        self._has_kernels = has_kernels
        self._text_config = model.config.get_text_config()
        self._forward: Forward = StockForward(model)
        self._pads_single_rows = not is_single_row_exact(model)
        # A single row may be padded to two.
        self._least_rows = 2 if self._pads_single_rows else 1
        self._most_rows = max(self._least_rows, max_num_seqs)
        self._graphs = None if capturer is None else self._open_graphs(capturer, max_batched_tokens)
        self._replay: DecodeReplay | None = self._graphs
        self.visited_layers: set[int] = set()

    def _open_graphs(self, capturer: GraphCapturer, max_batched_tokens: int) -> CudaDecodeReplay:
        return CudaDecodeReplay(
            self._compute,
            self._kv,
            capturer,
            max_num_seqs=self._most_rows,
            max_batched_tokens=max_batched_tokens,
            max_graphs=MAX_GRAPHS,
        )

    def trace(self) -> None:
        """Trace the model, prepare its decode steps, and run the traced pass from now on."""
        self._forward = trace(self._model, self._kv, has_kernels=self._has_kernels)
        if self._replay is None and isinstance(self._forward, TracedForward):
            self._replay = self._forward.open_replay(self._kv, self._most_rows)
        self.prepare()

    def prepare(self) -> None:
        """Prepare the decode steps that first steps would wait for."""
        if self._replay is not None:
            self._replay.prepare(self._least_rows, self._most_rows)

    @property
    def num_captured(self) -> int:
        """The number of captured decode steps."""
        return 0 if self._replay is None else self._replay.num_captured

    @property
    def forward(self) -> str:
        """How the forward pass runs, in words."""
        return self._forward.description

    @property
    def captured(self) -> str | None:
        """What capturing at the start took, in words; None if nothing was captured then."""
        report = None if self._graphs is None else self._graphs.report
        return None if report is None else str(report)

    @property
    def captured_bytes(self) -> int:
        """The device's memory that capturing at the start took; 0 if nothing was captured then."""
        report = None if self._graphs is None else self._graphs.report
        return 0 if report is None else report.num_bytes

    def drop_captured(self) -> None:
        """Drop the captured decode steps to free their memory."""
        if self._replay is not None:
            self._replay.drop()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepLogits | None:
        """Run a plan; return the logits of the sequences that are due, or None if none is.

        Raises:
            ValueError: The log-probabilities of a prompt are wanted, and are not finite.
        """
        parts: list[StepLogits] = []
        text = tuple(chunk for chunk in plan.prefill if not chunk.has_images)
        if plan.decode or text:
            parts.append(self._run_packed(StepPlan(plan.decode, text)))
        parts += [self._run_stock(chunk) for chunk in plan.prefill if chunk.has_images]
        return StepLogits.join([part for part in parts if part.sequences or part.scores])

    def _run_packed(self, plan: StepPlan) -> StepLogits:
        is_padded = self._pads_single_rows and plan.num_tokens == 1
        if is_padded:
            plan = StepPlan(plan.decode * 2, plan.prefill * 2)  # stores the same token twice
        step = self._pack(plan)
        token_ids = [row.sequence.token_ids[-1] for row in plan.decode]
        if self._replay is not None and not plan.prefill:
            replayed = self._replay.run(token_ids, step)
            if replayed is not None:
                sequences = tuple(row.sequence for row in plan.decode)
                num_due = 1 if is_padded else len(sequences)
                return StepLogits(sequences[:num_due], replayed[:num_due])
        positions = list(step.rotary_positions)
        due = [(row.sequence, i) for i, row in enumerate(plan.decode)]
        scored: list[PrefillChunk] = []
        scored_rows: list[int] = []
        for chunk, rows in zip(plan.prefill, step.chunks, strict=True):
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            shift = chunk.sequence.position_shift
            positions += range(chunk.start + shift, chunk.end + shift)
            if chunk.end == len(chunk.sequence.token_ids):
                due.append((chunk.sequence, rows.rows.stop - 1))
            if wanted := chunk.scored:
                scored.append(chunk)
                scored_rows += [rows.first_row + at - 1 - chunk.start for at in wanted if at]
        if is_padded:
            due, scored, scored_rows = due[:1], scored[:1], scored_rows[:1]
        due_rows = [row for _, row in due] + scored_rows
        if self._pads_single_rows and len(due_rows) == 1:
            due_rows *= 2
        logits = self._logits_of(token_ids, positions, due_rows, step)
        # Always a copy: the next run may reuse the logits' memory.
        return StepLogits(
            tuple(sequence for sequence, _ in due),
            logits[: len(due)].to(torch.float32, copy=True),
            tuple(_scores(scored, logits[len(due) :])),
        )

    def _logits_of(
        self, token_ids: list[int], positions: list[int], due: list[int], step: PackedStep
    ) -> torch.Tensor:
        """Run a step of n rows, by a graph if there is one; return [k, vocab] for k due rows."""
        if self._graphs is not None and step.chunks:
            replayed = self._graphs.run_mixed(token_ids, positions, due, step)
            if replayed is not None:
                return replayed
        if self._kv.reads_by_length:
            own_ids, own_positions, own_due = step.send(token_ids, positions, due)
        else:
            own_ids, own_positions, own_due = (
                to_device(numbers, self._kv.device, torch.int64)
                for numbers in (token_ids, positions, due)
            )
        return self._compute(own_ids[None], own_positions[None], own_due, step)

    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Run the model on n packed rows.

        Args:
            token_ids: [1, n], int64.
            positions: [1, n], int64.
            due: [k], int64, the rows whose logits are wanted.
            step: The extents and position of each row.

        Returns:
            [k, vocab], in the model's dtype.
        """
        logits = self._forward(token_ids, positions, due, step)
        self.visited_layers |= step.visited_layers
        return logits[0]

    def _pack(self, plan: StepPlan) -> PackedStep:
        """Lay out the rows: decode rows first, then the chunks."""
        chunks, first_row = list[ChunkRows](), len(plan.decode)
        for chunk in plan.prefill:
            chunks.append(ChunkRows(first_row, chunk.starts, chunk.start, chunk.end))
            first_row += chunk.end - chunk.start
        return PackedStep(
            kv=self._kv,
            decode_starts=tuple(row.starts for row in plan.decode),
            decode_positions=tuple(row.sequence.num_computed_tokens for row in plan.decode),
            chunks=tuple(chunks),
            decode_shifts=tuple(row.sequence.position_shift for row in plan.decode),
        )

    def _run_stock(self, chunk: PrefillChunk) -> StepLogits:
        """Prefill a whole prompt with images, without the answer's tokens.

        So the prompt's keys and values are the same when the sequence is resumed.
        """
        sequence = chunk.sequence
        device = self._kv.device
        inputs = {name: t.to(device) for name, t in sequence.request.model_inputs.items()}
        token_ids = torch.tensor([sequence.request.prompt_token_ids], device=device)
        if is_multi_axis(self._model.config):
            lay_out: Any = self._model.get_submodule("model").get_rope_index
            inputs["position_ids"], shift = lay_out(token_ids, **inputs)
            sequence.position_shift = int(shift)
        cache = _TrimmedCache(config=self._text_config)
        with self._stock_attention():
            output = self._model(
                input_ids=token_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **inputs,
            )
        self._kv.load(chunk.starts, cache)
        is_due = chunk.end == len(sequence.token_ids)
        return StepLogits((sequence,) if is_due else (), output.logits[0, -1:].float())

    @contextmanager
    def _stock_attention(self) -> Iterator[None]:
        """Use transformers' own attention, for a prompt with images."""
        ours = self._text_config._attn_implementation
        self._text_config._attn_implementation = STOCK_ATTENTION
        try:
            yield
        finally:
            self._text_config._attn_implementation = ours


def _scores(
    chunks: list[PrefillChunk], logits: torch.Tensor
) -> Iterator[tuple[Sequence, PromptScores]]:
    """Yield the scores of each chunk's tokens, by the logits of all their rows, [k, vocab]."""
    first = 0
    for chunk in chunks:
        sequence, wanted = chunk.sequence, chunk.scored
        num_top = sequence.request.params.prompt_logprobs
        assert num_top is not None, "only a sequence that wants them is scored"
        token_ids = sequence.token_ids[max(1, wanted.start) : wanted.stop]
        yield sequence, score_prompt(logits[first : first + len(token_ids)], token_ids, num_top)
        first += len(token_ids)
