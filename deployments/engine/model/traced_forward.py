"""A language model's forward pass as a trace, over packed steps and the KV cache.

It gives the same logits to the last bit; only fused GELU differs in float32.

A model can't be traced if its control flow depends on tensor values (some mixtures of experts) or
on the number of rows. Such a model keeps its own forward pass, and so does a model whose trace
gives different logits.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from deployments.compute.attention_arguments import check_arguments
from deployments.compute.device_errors import is_of_device
from deployments.compute.sdpa import Scores
from deployments.compute.speedups import (
    fuse_on_cpu,
    fuse_on_gpu,
    open_kept_trace,
)
from deployments.compute.traced_model.kept_trace import Trace
from deployments.compute.traced_model.traced_graph import NotTraceableError, attend, simplify
from deployments.compute.traced_model.traced_pass import TracedPass, find_faithful
from deployments.engine.attention.attention import store_and_attend
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.model.forward import Forward, StockForward
from deployments.engine.replay.decode_replay import DecodeReplay
from deployments.plan.kv_layout import KVLayout

logger = logging.getLogger(__name__)

TRACING_ATTENTION = "tracing"
"""The language model's attention implementation while it is traced."""

NUM_ROWS, NUM_DUE = 7, 3
"""Rows of the traced pass, and rows whose logits it returns. Both become symbols for any number, so
they must differ from each other and from 0 and 1."""

PURPOSE = f"logits of {NUM_DUE} of {NUM_ROWS} rows"
"""What is traced, for the place where the trace is kept."""

PROBE_LENGTH = 16
"""Tokens of an extent when the trace is compared with the model."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed difference, relative to the largest logit. Other kernels add in another order, and each
layer rounds the differing results."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The values that distinguish one layer's attention call from the others."""

    layer: int
    scores: Scores


class TracedForward(TracedPass):
    """Runs a traced forward pass, with fused operators where the device has them."""

    def __init__(
        self, model: PreTrainedModel, *, has_kernels: bool, reads_kept: bool = True
    ) -> None:
        """Trace a model symbolically, unless its trace is on disk; nothing is computed.

        Args:
            model: Attends over the KV cache, on its device.
            has_kernels: Whether its device runs the CPU's kernels.
            reads_kept: Whether a trace that is on disk may be used.

        Raises:
            NotTraceableError: The model's control flow depends on values, or on the number of rows.
        """
        self._has_kernels = has_kernels
        place = open_kept_trace(model, PURPOSE) if has_kernels else None
        make = partial(_traced, model, has_kernels=has_kernels)
        super().__init__(make, place, reads_kept=reads_kept)
        self._calls = [_call_of(noted) for noted in self._notes]

    @property
    def description(self) -> str:
        """How the pass runs, in words."""
        return "traced, with fused operators" if self.is_fused else "traced"

    def open_replay(self, kv: KVCache, max_rows: int) -> DecodeReplay | None:
        """Return a replay of decode steps, or None for a pass without the CPU's fused operators.

        Args:
            kv: The KV cache.
            max_rows: The most rows of a step.
        """
        if self._fused is None or not self._has_kernels:
            return None
        # Imported here: programs need llvmlite, which a machine with a GPU may lack.
        from deployments.engine.replay.cpu_replay import CpuDecodeReplay

        attend_by = partial(partial, _attend_by, self._calls)
        return CpuDecodeReplay(self._fused, kv, max_rows, attend_by)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Run the traced pass; see `Forward`."""
        graph = self._graph if self._fused is None else self._fused
        logits = graph(token_ids, positions, due, partial(_attend_by, self._calls, step))
        assert isinstance(logits, torch.Tensor)
        return logits


def _attend_by(
    calls: Sequence[AttentionCall],
    step: PackedStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: int,
) -> torch.Tensor:
    call = calls[index]
    return store_and_attend(call.layer, query, key, value, step, call.scores)


def trace(model: PreTrainedModel, kv: KVCache, *, has_kernels: bool) -> Forward:
    """Return the model's traced forward pass, or its own if it can't be traced faithfully.

    Args:
        model: Attends over the KV cache, on its device.
        kv: The KV cache; nothing is read or written there.
        has_kernels: Whether its device runs our kernels.
    """
    own = StockForward(model)

    @cache
    def expected() -> list[torch.Tensor]:
        return _probe(own, kv)

    def is_faithful(traced: TracedForward) -> bool:
        wanted = expected()
        try:
            return _agree(wanted, _probe(traced, kv))
        except Exception as error:  # Triton needs a C compiler, and may lack other things
            # A CPU's kernels need nothing that may be missing: there it is a bug, or memory ran
            # out.
            if has_kernels or is_of_device(error) or not traced.is_fused:
                raise
            logger.warning("fused operators fail here", exc_info=True)
            return False

    open_pass = partial(TracedForward, model, has_kernels=has_kernels)
    try:
        traced = find_faithful(open_pass, is_faithful, "logits")
    except NotTraceableError as error:
        logger.info("the forward pass is not traced: %s", error)
        return own
    if traced is None:
        logger.warning("the forward pass is not traced: its logits would differ")
    return own if traced is None else traced


def _traced(model: PreTrainedModel, *, has_kernels: bool) -> Trace:
    """Trace a model; see `TracedForward`."""
    # Imported here: most starts find their trace on disk, and need no part of torch's tracer.
    from deployments.compute.traced_model.graph_tracer import trace_graph

    device, calls = model.device, list[AttentionCall]()
    inputs = (
        torch.zeros(1, NUM_ROWS, dtype=torch.long, device=device),
        torch.arange(NUM_ROWS, device=device)[None],
        torch.arange(NUM_DUE, device=device),
    )
    with _tracing(model.config.get_text_config()):
        plain = trace_graph(partial(_logits, model, calls), inputs)
    fused = None
    if has_kernels:
        fused = fuse_on_cpu(plain)
    elif device.type != "cpu":
        fused = fuse_on_gpu(plain, model.dtype, device)
    for graph in filter(None, (plain, fused)):
        simplify(graph)
    return Trace(plain, fused, [_note_of(call) for call in calls])


def _note_of(call: AttentionCall) -> list[Any]:
    """Return a call as a trace keeps it; `_call_of` reads it."""
    return [call.layer, call.scores.scale, call.scores.softcap, call.scores.sinks]


def _call_of(noted: list[Any]) -> AttentionCall:
    layer, *scores = noted
    # Only now: while tracing, a tensor that is computed has no values.
    return AttentionCall(layer, Scores(*scores).ready())


def _agree(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    pairs = zip(expected, found, strict=True)
    return all(_are_close(*pair) for pair in pairs)


def _are_close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    difference = (expected.float() - found.float()).abs().amax()
    return bool(difference <= TOLERANCE[expected.dtype] * expected.abs().amax())


def _probe(forward: Forward, like: KVCache) -> list[torch.Tensor]:
    """Return the logits of a prefill, of a decode row with a prefill, and of a decode row only.

    The last ones are replayed if the pass has a replay.

    Args:
        forward: The pass.
        like: Has the shape, the device and the kernel of the KV cache that is probed with.
    """
    capacities = like.shape.group_capacities(PROBE_LENGTH)
    layout = KVLayout(capacities, (2,) * len(capacities), block_size=PROBE_LENGTH)
    kv = KVCache(
        like.shape,
        layout,
        max_model_len=PROBE_LENGTH,
        device=like.device,
        attends_in_place=like.attends_in_place,
        reads_by_length=like.reads_by_length,
        store=like.store,
        attend_rows=like.attend_rows,
    )
    one, other = (0,) * kv.num_groups, (PROBE_LENGTH,) * kv.num_groups
    prefill = PackedStep(kv, (), (), (ChunkRows(0, one, 0, 5),))
    mixed = PackedStep(kv, (one,), (5,), (ChunkRows(1, other, 0, 3),))
    decode = PackedStep(kv, (other,), (3,), ())

    def run(positions: Iterable[int], due: list[int], step: PackedStep) -> torch.Tensor:
        row = torch.tensor([*positions], device=kv.device)[None]
        return forward(row + 1, row, torch.tensor(due, device=kv.device), step)

    with torch.inference_mode():
        logits = [run(range(5), [4], prefill), run([5, *range(3)], [0, 3], mixed)]
        replay = forward.open_replay(kv, 1) if isinstance(forward, TracedForward) else None
        replayed = None if replay is None else replay.run([4], decode)
        logits.append(run([3], [0], decode) if replayed is None else replayed[None])
    return logits


def _logits(
    model: PreTrainedModel,
    calls: list[AttentionCall],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    due: torch.Tensor,
) -> torch.Tensor:
    output = model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=due,
        traced_calls=calls,
    )
    assert isinstance(output.logits, torch.Tensor)
    return output.logits


def _trace_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    traced_calls: list[AttentionCall],
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for `kv_attention` while a model is traced.

    The window is not checked: the model has warmed up, which checked it.
    """
    check_arguments(module, attention_mask, others)
    layer = module.layer_idx
    assert isinstance(layer, int)
    traced_calls.append(AttentionCall(layer, Scores(scaling, softcap, s_aux)))
    return attend(query, key, value, len(traced_calls) - 1), None


AttentionInterface.register(TRACING_ATTENTION, _trace_attention)


@contextmanager
def _tracing(text_config: PreTrainedConfig) -> Iterator[None]:
    """Let the model attend by `_trace_attention`."""
    ours = text_config._attn_implementation
    text_config._attn_implementation = TRACING_ATTENTION
    try:
        yield
    finally:
        text_config._attn_implementation = ours
