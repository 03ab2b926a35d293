"""A packed backbone, traced once into a flat list of operators on this project's kernels.

With a short text, the modules of a stock backbone take as long as a third of its arithmetic, and
all lanes wait for Python's GIL meanwhile.
"""

import logging
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

from deployments.compute.sdpa import Scores
from deployments.compute.speedups import (
    fuse_on_cpu,
    open_kept_trace,
    releasing_gil,
)
from deployments.compute.traced_model.kept_trace import Trace
from deployments.compute.traced_model.traced_graph import NotTraceableError, attend, simplify
from deployments.compute.traced_model.traced_pass import TracedPass, find_faithful
from deployments.pooling.packed_attention import AttendedRow, AttentionCall
from deployments.pooling.packed_backbone import (
    PackedBackbone,
    TextModel,
    are_close,
    pad,
)

logger = logging.getLogger(__name__)

NUM_ROWS = 7
"""Tokens of the traced row. The number becomes a symbol for any, so it must be neither 0 nor 1."""


class _TracedRow:
    """Stands in for the row while a backbone is traced, and notes each call of attention."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Note the call; see `AttendedRow`."""
        self.calls.append(call)
        output: torch.Tensor = attend(query, key, value, len(self.calls) - 1)
        return output


class TracedBackbone(TracedPass):
    """Runs the trace of a backbone; any number of threads may do so at once."""

    def __init__(
        self, backbone: torch.nn.Module, *, with_types: bool, reads_kept: bool = True
    ) -> None:
        """Trace a backbone, unless its trace is on disk; nothing is computed.

        Args:
            backbone: Its attention implementation is `packed`, and its weights are packed too.
            with_types: Whether it is given the types of tokens; if they are not known, zeros.
            reads_kept: Whether a trace that is on disk may be used.

        Raises:
            NotTraceableError: Its control flow depends on values or on the number of tokens, or its
                output has other parts than tensors.
        """
        self._with_types = with_types
        num_inputs = 3 if with_types else 2
        place = open_kept_trace(backbone, f"backbone of {num_inputs} x {NUM_ROWS}")
        super().__init__(partial(_traced, backbone, num_inputs), place, reads_kept=reads_kept)
        kind, self._names, calls = self._notes
        self._kind = _output_kind(*kind)
        self._calls = [
            AttentionCall(is_causal, window, Scores(*scores))
            for is_causal, window, *scores in calls
        ]

    def takes(self, types: torch.Tensor | None) -> bool:
        """Return whether the trace is valid for texts of such types."""
        return types is None or self._with_types

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None,
        row: AttendedRow,
    ) -> ModelOutput:
        """Run the trace.

        Args:
            ids: [1, n].
            positions: [1, n].
            types: [1, n], or None if there are none; see `takes`.
            row: The layout of the sequences.

        Returns:
            The backbone's own output.
        """
        graph = self._graph if self._fused is None else self._fused
        inputs = [ids, positions]
        if self._with_types:
            inputs.append(torch.zeros_like(ids) if types is None else types)

        def attend_by(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: int
        ) -> torch.Tensor:
            return row.attend(query, key, value, self._calls[index])

        with releasing_gil():
            found = graph(*inputs, attend_by)
        return self._kind(**dict(zip(self._names, found, strict=True)))


def _traced(backbone: torch.nn.Module, num_inputs: int) -> Trace:
    """Trace a backbone; see `TracedBackbone`."""
    # Imported here: most starts find their trace on disk, and need no part of torch's tracer.
    from deployments.compute.traced_model.graph_tracer import trace_graph

    row, outputs = _TracedRow(), list[ModelOutput]()
    # The tracer tells inputs apart by their identity.
    inputs = [torch.arange(NUM_ROWS)[None] for _ in range(num_inputs)]
    plain = trace_graph(partial(_run_stock, backbone, row, outputs), inputs)
    fused = fuse_on_cpu(plain)
    for graph in filter(None, (plain, fused)):
        simplify(graph)
    (output,) = outputs
    kind = [type(output).__module__, type(output).__qualname__]
    return Trace(plain, fused, [kind, [*output], [_note_of(call) for call in row.calls]])


def _note_of(call: AttentionCall) -> list[Any]:
    """Return a call as a trace keeps it."""
    scores = call.scores
    return [call.is_causal, call.window, scores.scale, scores.softcap, scores.sinks]


def _output_kind(module: str, name: str) -> type[ModelOutput]:
    """Return a class of outputs by the names of its module and its own.

    Raises:
        NotTraceableError: transformers has no such class.
    """
    if module.partition(".")[0] == "transformers":
        kind = getattr(import_module(module), name, None)
        if isinstance(kind, type) and issubclass(kind, ModelOutput):
            return kind
    raise NotTraceableError(f"its output is a {module}.{name}")


def _run_stock(
    backbone: torch.nn.Module,
    row: _TracedRow,
    outputs: list[ModelOutput],
    ids: torch.Tensor,
    positions: torch.Tensor,
    *types: torch.Tensor,
) -> list[torch.Tensor]:
    options: dict[str, Any] = {"token_type_ids": types[0]} if types else {}
    output = backbone(input_ids=ids, position_ids=positions, packed_row=row, **options)
    others = [name for name, part in output.items() if not isinstance(part, torch.Tensor)]
    if others:
        raise NotTraceableError(f"its output has {', '.join(others)}")
    outputs.append(output)
    return list(output.values())


@torch.inference_mode()
def trace(model: TextModel, texts: Sequence[Sequence[int]], *, reads_types: bool) -> None:
    """Let a packed model's backbone run as a trace, if that gives the same hidden states.

    Args:
        model: Its backbone and its weights are packed.
        texts: Texts to try; their lengths should differ.
        reads_types: Whether the model tells a pair's texts apart by the types of tokens.
    """
    backbone = model.base_model
    assert isinstance(backbone, PackedBackbone)
    pad_token_id = model.config.get_text_config().pad_token_id or 0
    batch, mask = pad([torch.tensor(text) for text in texts], pad_token_id)
    try:
        if _use_trace(backbone, batch, mask, reads_types=reads_types):
            return
        reason = "its hidden states would differ"
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything
        reason = f"{type(error).__name__}: {error}"
    logger.info("%s models are not traced: %s", model.config.model_type, reason)
    backbone.traced = None


def _use_trace(
    backbone: PackedBackbone, batch: torch.Tensor, mask: torch.Tensor, *, reads_types: bool
) -> bool:
    """Make a backbone use its trace; return whether its hidden states stay the same.

    Args:
        backbone: Uses no trace yet.
        batch: Texts to try, [n, length].
        mask: [n, length], 1 where there is a token.
        reads_types: See `trace`.
    """
    # To most models a text without types is one of zeros; to GPT-2 it is not.
    with_types = reads_types and torch.equal(
        _hidden(backbone, batch, mask), _hidden(backbone, batch, mask, torch.zeros_like(batch))
    )
    tried: list[tuple[torch.Tensor, ...]] = [(batch, mask), (batch[:1, :1], mask[:1, :1])]
    if with_types:
        tried.append((batch, mask, torch.arange(batch.shape[1]).expand_as(batch) % 2))
    expected = [_hidden(backbone, *each) for each in tried]

    def is_faithful(traced: TracedBackbone) -> bool:
        backbone.traced = traced
        return all(map(_are_alike, expected, [_hidden(backbone, *each) for each in tried]))

    open_pass = partial(TracedBackbone, backbone.stock, with_types=with_types)
    return find_faithful(open_pass, is_faithful, "hidden states") is not None


def _hidden(
    backbone: PackedBackbone,
    batch: torch.Tensor,
    mask: torch.Tensor,
    types: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the hidden states of texts, [n, length, hidden]."""
    hidden: torch.Tensor = backbone(batch, mask, token_type_ids=types)["last_hidden_state"]
    return hidden


def _are_alike(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether each text's hidden states are equal but for rounding."""
    return torch.equal(expected.isfinite(), found.isfinite()) and all(
        map(are_close, expected, found)
    )
