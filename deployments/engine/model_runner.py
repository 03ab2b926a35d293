"""One forward pass of the model for one step.

Packs the decode rows and the text prefill chunks into a single row [1, n]; prompts with images go
through the model's stock forward, one by one, and their cache is copied into the slot.

Running the same tokens again writes the same keys and values, so a step that failed may be run
again in parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from deployments.engine.attention import READ_BUCKET, ChunkRows, PackedStep
from deployments.engine.kv_slots import KVSlots
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

    def __init__(self, model: PreTrainedModel, kv: KVSlots) -> None:
        """Take the model and its slots; both stay on their device."""
        self._model = model
        self._kv = kv
        self._text_config = model.config.get_text_config()
        self.visited_layers: dict[int, int | None] = {}

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
        device = self._kv.keys[0].device
        step, token_ids = self._pack(plan)
        due = [(row.sequence, i) for i, row in enumerate(plan.decode)]
        due += [
            (chunk.sequence, rows.rows.stop - 1)
            for chunk, rows in zip(plan.prefill, step.chunks, strict=True)
            if chunk.end == len(chunk.sequence.token_ids)
        ]
        output = self._model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor([row for _, row in due], dtype=torch.long, device=device),
            packed_step=step,
        )
        self.visited_layers |= step.visited_layers
        if output.logits.shape[1] != len(due):
            raise ValueError("the model does not know logits_to_keep")
        return StepLogits(tuple(sequence for sequence, _ in due), output.logits[0].float())

    def _pack(self, plan: StepPlan) -> tuple[PackedStep, list[int]]:
        """Lay out the rows: decode rows first, in the order of their slots, then the chunks."""
        token_ids = [row.sequence.token_ids[-1] for row in plan.decode]
        positions = [row.sequence.num_computed_tokens for row in plan.decode]
        slots = [row.slot for row in plan.decode]
        num_decode = len(slots)
        longest = max(positions, default=-1) + 1
        chunks = []
        for chunk in plan.prefill:
            chunks.append(ChunkRows(len(token_ids), chunk.slot, chunk.start, chunk.end))
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += [chunk.slot] * (chunk.end - chunk.start)
        device = self._kv.keys[0].device
        slots_tensor = torch.tensor(slots, device=device)
        is_view = slots[:num_decode] == list(range(num_decode))
        step = PackedStep(
            kv=self._kv,
            slots=slots_tensor,
            positions=torch.tensor(positions, device=device),
            num_decode=num_decode,
            decode_slots=None if is_view else slots_tensor[:num_decode],
            read_length=min(-(-longest // READ_BUCKET) * READ_BUCKET, self._kv.max_model_len),
            chunks=tuple(chunks),
        )
        return step, token_ids

    def _run_stock(self, chunk: PrefillChunk) -> StepLogits:
        """Prefill a whole prompt with images."""
        sequence = chunk.sequence
        device = self._kv.keys[0].device
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
