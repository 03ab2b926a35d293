"""A model's forward pass, recorded once as a flat list of operators.

A stock model's forward pass runs through hundreds of modules, wrappers and keyword arguments; for a
small model that takes as long as the arithmetic does. Recorded once with any number of rows, the
operators run one after the other, on the same weights, with the same result to the last bit.

A model whose way depends on the values in its tensors (some mixtures of experts), or on the number
of rows, can't be recorded. It keeps its own forward pass, as does one that gives other logits then.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from deployments.engine.attention import attend_slots
from deployments.engine.attention_call import check_arguments
from deployments.engine.forward import Forward, StockForward
from deployments.engine.kv_slots import KVShape, KVSlots
from deployments.engine.packed_step import ChunkRows, PackedStep
from deployments.engine.softcap import Scores

if TYPE_CHECKING:
    from deployments.engine.cpu.decode_program import DecodePrograms

logger = logging.getLogger(__name__)

RECORDING_ATTENTION = "recording"
"""What the language model attends by while it is recorded."""

NUM_ROWS, NUM_DUE = 7, 3
"""Rows, and rows whose logits are wanted, of the recorded pass. They stand for any number, so they
must differ from each other and from 0 and 1."""

PROBE_LENGTH = 16
"""Tokens of the slots on which both ways are compared."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the largest logit. Other kernels add in another order, and layers round what differs."""

aten = torch.ops.aten

FASTER: Mapping[object, Callable[..., Any]] = {
    aten._to_copy.default: torch.Tensor.to,
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.silu.default: torch.nn.functional.silu,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.sym_size.int: torch.Tensor.size,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}
"""The same operators by torch's own bindings, from which it is a third of the way to the kernel."""


class NotRecordableError(ValueError):
    """The model's forward pass can't be recorded; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call of its attention, as far as it differs from the others."""

    layer: int
    scores: Scores


@torch.library.custom_op("raystream::attend", mutates_args=())
def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
    raise AssertionError("stands for attention while a model is recorded")


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: int) -> torch.Tensor:
    _, num_heads, num_rows, _ = query.shape
    return query.new_empty(1, num_rows, num_heads, value.shape[-1])


class RecordedForward:
    """Runs what was recorded; on a CPU with fused operators."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Record a model, which is not run on any values.

        Args:
            model: It attends over slots, on its device.

        Raises:
            NotRecordableError: Its way depends on values, or on the number of rows.
        """
        self._calls: list[AttentionCall] = []
        device = model.device
        inputs = (
            torch.zeros(1, NUM_ROWS, dtype=torch.long, device=device),
            torch.arange(NUM_ROWS, device=device)[None],
            torch.arange(NUM_DUE, device=device),
        )
        trace = make_fx(
            partial(_logits, model, self._calls),
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,  # the weights
        )
        try:
            with _recording(model.config.get_text_config()):
                self._graph = trace(*inputs)
        except Exception as error:  # a foreign model may raise anything
            raise NotRecordableError(f"{type(error).__name__}: {error}") from error
        _refuse_guards(self._graph)
        _refuse_values(self._graph)
        self._fused = _speed_up(self._graph) if device.type == "cpu" else None
        for graph in filter(None, (self._graph, self._fused)):
            _simplify(graph)
        self._programs: DecodePrograms | None = None

    def unfuse(self) -> bool:
        """From here on run torch's operators alone; return whether there were others."""
        was_fused, self._fused, self._programs = self._fused is not None, None, None
        return was_fused

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor:
        """Run what was recorded; see `Forward`."""
        logits = self._run_program(token_ids, positions, due, step)
        if logits is not None:
            return logits
        graph = self._graph if self._fused is None else self._fused
        logits = graph(token_ids, positions, due, partial(_attend_by, self._calls, step))
        assert isinstance(logits, torch.Tensor)
        return logits

    def _run_program(
        self, token_ids: torch.Tensor, positions: torch.Tensor, due: torch.Tensor, step: PackedStep
    ) -> torch.Tensor | None:
        if self._fused is None:
            return None
        if self._programs is None or self._programs.kv is not step.kv:
            # Only here: see `_speed_up`.
            from deployments.engine.cpu.decode_program import DecodePrograms

            attend = partial(partial, _attend_by, self._calls)
            self._programs = DecodePrograms(self._fused, step.kv, attend)
        return self._programs.run(token_ids, positions, due, step)


def _attend_by(
    calls: Sequence[AttentionCall],
    step: PackedStep,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: int,
) -> torch.Tensor:
    call = calls[index]
    return attend_slots(call.layer, query, key, value, step, call.scores)


def record(model: PreTrainedModel, shape: KVShape) -> Forward:
    """Return the model's recorded forward pass, or its own if the other gives other logits.

    Args:
        model: It attends over slots, on its device.
        shape: Of the slots.
    """
    own = StockForward(model)
    try:
        recorded = RecordedForward(model)
    except NotRecordableError as error:
        logger.info("the forward pass is not recorded: %s", error)
        return own
    expected = _probe(own, model, shape)
    if _agree(expected, _probe(recorded, model, shape)):
        return recorded
    if recorded.unfuse() and _agree(expected, _probe(recorded, model, shape)):
        logger.warning("operators are not fused: the logits would be others")
        return recorded
    logger.warning("the forward pass is not recorded: its logits would be others")
    return own


def _agree(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    pairs = zip(expected, found, strict=True)
    return all(_are_close(*pair) for pair in pairs)


def _are_close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    difference = (expected.float() - found.float()).abs().amax()
    return bool(difference <= TOLERANCE[expected.dtype] * expected.abs().amax())


def _probe(forward: Forward, model: PreTrainedModel, shape: KVShape) -> list[torch.Tensor]:
    """Return the logits of a prefill, of decoding beside another prefill, and of one row alone."""
    kv = KVSlots(shape, num_slots=2, max_model_len=PROBE_LENGTH, device=model.device)
    steps = (
        PackedStep(kv, (), (), (ChunkRows(0, 0, 0, 5),)),
        PackedStep(kv, (0,), (5,), (ChunkRows(1, 1, 0, 3),)),
        PackedStep(kv, (1,), (3,), ()),
    )
    inputs = ((range(5), [4]), ([5, *range(3)], [0, 3]), ([3], [0]))

    def tensor(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), device=model.device)

    with torch.inference_mode():
        return [
            forward(tensor(positions)[None] + 1, tensor(positions)[None], tensor(due), step)
            for (positions, due), step in zip(inputs, steps, strict=True)
        ]


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
        recorded_calls=calls,
    )
    assert isinstance(output.logits, torch.Tensor)
    return output.logits


def _record_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    recorded_calls: list[AttentionCall],
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for `slot_attention` while a model is recorded.

    A window is what the slots were made for: the model has warmed up on them.
    """
    check_arguments(module, attention_mask, others)
    layer = module.layer_idx
    assert isinstance(layer, int)
    recorded_calls.append(AttentionCall(layer, Scores(scaling, softcap)))
    return _attend(query, key, value, len(recorded_calls) - 1), None


AttentionInterface.register(RECORDING_ATTENTION, _record_attention)


@contextmanager
def _recording(text_config: PreTrainedConfig) -> Iterator[None]:
    """Let the model attend by what records it, on tensors that can be recorded."""
    ours = text_config._attn_implementation
    text_config._attn_implementation = RECORDING_ATTENTION
    # It would log as an error, with a traceback, what becomes a NotRecordableError.
    fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
    fake_tensors.disabled = True
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        fake_tensors.disabled = False
        text_config._attn_implementation = ours


def _refuse_guards(graph: torch.fx.GraphModule) -> None:
    """Refuse what holds for some numbers of rows alone.

    Raises:
        NotRecordableError: Names the conditions.
    """
    placeholder = next(node for node in graph.graph.nodes if node.op == "placeholder")
    guards = placeholder.meta["val"].fake_mode.shape_env.guards
    if guards:
        conditions = ", ".join(str(guard.expr) for guard in guards)
        raise NotRecordableError(f"it depends on the number of rows: {conditions}")


def _refuse_values(graph: torch.fx.GraphModule) -> None:
    """Refuse tensors whose shape is known only once the values are.

    Raises:
        NotRecordableError: Names the first.
    """
    for node in graph.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor) and free_unbacked_symbols(value):
            raise NotRecordableError(f"the shape of {node.name} depends on values")


def _speed_up(graph: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """Let a graph use the kernels for a CPU; return one that has fused operators too, if any."""
    # Only here: these need numba and llvmlite, which a machine that computes on a GPU may lack.
    from deployments.engine.cpu.few_rows_linear import multiply_few_rows
    from deployments.engine.cpu.fusion import fuse

    fused = fuse(graph)
    for each in filter(None, (graph, fused)):
        multiply_few_rows(each)
    return fused


def _simplify(graph: torch.fx.GraphModule) -> None:
    """Take attention as one more input, and call the operators by their fastest names."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.raystream.attend.default)
    last_input = graph.graph.find_nodes(op="placeholder")[-1]
    with graph.graph.inserting_after(last_input):
        attend = graph.graph.placeholder("attend")
    for node in nodes:
        node.target, node.args = _call, (attend, *node.args)
    for node in graph.graph.nodes:
        if node.target is aten._to_copy.default and not _is_cast(node):
            continue
        node.target = FASTER.get(node.target, node.target)
    graph.recompile()


def _call(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    return function(*arguments)


def _is_cast(node: torch.fx.Node) -> bool:
    """Return whether a copy is made to change the type and nothing else."""
    (source,) = node.all_input_nodes
    return node.kwargs.keys() == {"dtype"} and source.meta["val"].dtype != node.kwargs["dtype"]
