"""One forward pass of the model for one step.

Packs the decode rows and the text prefill chunks into a single row [1, n]; prompts with images go
through the model's stock forward, one by one, and their cache is copied into the slot.

A step of decode rows alone is captured and replayed where the device can do that.

A step that failed may be run again in parts: the same tokens write the same keys and values to the
same places. But where a layer holds only its window, a chunk may have taken the place of what its
own beginning sees; the step guard lets such a sequence start over.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from deployments.engine.cuda.decode_buckets import MAX_GRAPHS
from deployments.engine.cuda.decode_graphs import DecodeGraphs
from deployments.engine.cuda.graph_capture import GraphCapturer
from deployments.engine.cuda.slot_reads import can_read_slots
from deployments.engine.forward import Forward, StockForward
from deployments.engine.host_copy import to_device
from deployments.engine.kv_slots import KVSlots
from deployments.engine.packed_step import ChunkRows, PackedStep
from deployments.engine.recorded_forward import record
from deployments.engine.scheduler import PrefillChunk, StepPlan
from deployments.engine.sequence import Sequence

STOCK_ATTENTION = "sdpa"
"""What prompts with images are prefilled by."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step computed for the sequences that are due for their next token.

    Attributes:
        sequences: n of them.
        logits: [n, vocab], float32, on the model's device.
    """

    sequences: tuple[Sequence, ...]
    logits: torch.Tensor

    @classmethod
    def join(cls, parts: list["StepLogits"]) -> "StepLogits | None":
        """Return several as one; None when there are none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        sequences = tuple(sequence for part in parts for sequence in part.sequences)
        return cls(sequences, torch.cat([part.logits for part in parts]))


class ModelRunner:
    """Runs step plans on a model whose language model attends over slots."""

    def __init__(
        self, model: PreTrainedModel, kv: KVSlots, capturer: GraphCapturer | None = None
    ) -> None:
        """Take the model and its slots; both stay on their device.

        Args:
            model: Its language model attends over slots.
            kv: The slots.
            capturer: Captures decode steps, to launch them as a whole; None where nothing can.
        """
        self._model = model
        self._kv = kv
        self._text_config = model.config.get_text_config()
        self._graphs = None
        if capturer is not None:
            num_heads: int = self._text_config.num_attention_heads
            self._graphs = DecodeGraphs(
                self._compute,
                kv,
                capturer,
                max_graphs=MAX_GRAPHS,
                reads_by_length=can_read_slots(kv.shape, num_heads, kv.device),
            )
        self._forward: Forward = StockForward(model)
        self.visited_layers: set[int] = set()

    def record(self) -> None:
        """From here on run what `recorded_forward` makes of the model."""
        self._forward = record(self._model, self._kv.shape)

    @property
    def num_graphs(self) -> int:
        """Decode steps that are captured now."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    def drop_graphs(self) -> None:
        """Forget the decode steps that are captured, for the memory that they hold."""
        if self._graphs is not None:
            self._graphs.drop()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepLogits | None:
        """Run a plan; return the logits of the sequences that are due, None when none is."""
        parts: list[StepLogits] = []
        text = tuple(chunk for chunk in plan.prefill if chunk.sequence.is_divisible)
        if plan.decode or text:
            parts.append(self._run_packed(StepPlan(plan.decode, text)))
        parts += [self._run_stock(c) for c in plan.prefill if not c.sequence.is_divisible]
        return StepLogits.join([part for part in parts if part.sequences])

    def _run_packed(self, plan: StepPlan) -> StepLogits:
        if self._graphs is not None and not plan.prefill:
            logits = self._graphs.run(plan.decode)
            if logits is not None:
                return StepLogits(tuple(row.sequence for row in plan.decode), logits)
        device = self._kv.device
        step = self._pack(plan)
        token_ids = [row.sequence.token_ids[-1] for row in plan.decode]
        positions = list(step.decode_positions)
        due = [(row.sequence, i) for i, row in enumerate(plan.decode)]
        for chunk, rows in zip(plan.prefill, step.chunks, strict=True):
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.end == len(chunk.sequence.token_ids):
                due.append((chunk.sequence, rows.rows.stop - 1))
        logits = self._compute(
            to_device([token_ids], device, torch.int64),
            to_device([positions], device, torch.int64),
            to_device([row for _, row in due], device, torch.int64),
            step,
        )
        # A copy in any case: the next run may use the logits' memory again.
        return StepLogits(
            tuple(sequence for sequence, _ in due), logits.to(torch.float32, copy=True)
        )

    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Run the model on n packed rows.

        Args:
            token_ids: [1, n], int64.
            positions: [1, n], int64.
            due: [k], int64, the rows whose logits are wanted.
            step: Where the rows belong.

        Returns:
            [k, vocab], in the model's dtype.
        """
        logits = self._forward(token_ids, positions, due, step)
        self.visited_layers |= step.visited_layers
        return logits[0]

    def _pack(self, plan: StepPlan) -> PackedStep:
        """Lay out the rows: decode rows first, in the order of their slots, then the chunks."""
        chunks, first_row = list[ChunkRows](), len(plan.decode)
        for chunk in plan.prefill:
            chunks.append(ChunkRows(first_row, chunk.slot, chunk.start, chunk.end))
            first_row += chunk.end - chunk.start
        return PackedStep(
            kv=self._kv,
            decode_slots=tuple(row.slot for row in plan.decode),
            decode_positions=tuple(row.sequence.num_computed_tokens for row in plan.decode),
            chunks=tuple(chunks),
        )

    def _run_stock(self, chunk: PrefillChunk) -> StepLogits:
        """Prefill a whole prompt with images."""
        sequence = chunk.sequence
        device = self._kv.device
        inputs = {name: t.to(device) for name, t in sequence.request.model_inputs.items()}
        num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if "token_type_ids" in inputs:
            inputs["token_type_ids"] = torch.nn.functional.pad(
                inputs["token_type_ids"], (0, num_generated)
            )
        cache = DynamicCache(config=self._text_config)
        with self._stock_attention():
            output = self._model(
                input_ids=torch.tensor([sequence.token_ids], device=device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **inputs,
            )
        self._kv.load(chunk.slot, cache)
        return StepLogits((sequence,), output.logits[0, -1:].float())

    @contextmanager
    def _stock_attention(self) -> Iterator[None]:
        """Let the language model attend as transformers does, for a prompt with images."""
        ours = self._text_config._attn_implementation
        self._text_config._attn_implementation = STOCK_ATTENTION
        try:
            yield
        finally:
            self._text_config._attn_implementation = ours
