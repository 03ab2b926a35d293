from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PreTrainedModel

from deployments.compute.cpu.fusion import ops
from deployments.compute.cpu.linear.prepacked_linear import can_prepack
from deployments.compute.fusion.fuse import fuse
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.model.loader import prepare_model
from deployments.engine.model.traced_forward import TracedForward, trace
from tests.compute.cpu.fusion.exactness import exact
from tests.engine.attention.extents import make_cache
from tests.engine.tiny_models import MODELS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

MakeModel = Callable[[], PreTrainedModel]
Counts = dict[Callable[..., object], int]

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])

GEMMAS = ("gemma2", "gemma3_text", "gemma3")
NORMED_HEADS = ("qwen3", "gemma3_text", "gemma3")
WITHOUT = ("gpt2", "opt", "mixtral", "qwen3_moe", "gpt_oss")
"""Families without such chains, or that can't be traced."""

FAMILIES = [name for name in MODELS if name not in WITHOUT]

ALIKE = ("qwen2_sliding", "llama3", "mistral", "gemma3")
"""Families with the operators of another; `test_traced_forward` compares them in float32."""

families = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak if n in ALIKE else ()) for n in FAMILIES]
)


def prepared(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model = MODELS[name]()
    torch.nn.Module.to(model, dtype)
    prepare_model(model)
    return model


def cache_of(model: PreTrainedModel) -> KVCache:
    shape = KVShape.of(model.config.get_text_config(), model.dtype)
    return make_cache(shape, [5], max_model_len=16)[0]


@cache
def traced(name: str, dtype: torch.dtype) -> tuple[TracedForward, KVShape]:
    """Trace a family once; a test that changes the trace must copy it."""
    model = prepared(name, dtype)
    return TracedForward(model, has_kernels=True), KVShape.of(model.config.get_text_config(), dtype)


def counts(graph: torch.fx.GraphModule | None) -> Counts:
    assert graph is not None
    ours = vars(ops).values()
    return dict(Counter(node.target for node in graph.graph.nodes if node.target in ours))


@dtypes
@families
def test_every_chain_of_a_family_is_fused(name: str, dtype: torch.dtype) -> None:
    forward, shape = traced(name, dtype)
    layers = len(shape.windows)
    # Two additions per layer, each followed by a norm; Gemma also norms what it adds.
    norms = 1 + 2 * layers * (name in GEMMAS) + 2 * layers * (name in NORMED_HEADS)
    expected: Counts = {ops.rms_norm: norms, ops.add_rms_norm: 2 * layers, ops.rotate: 2 * layers}
    # Gate and up projection are one product in Phi-3, and elsewhere where both can be prepacked.
    if name == "phi3" or can_prepack(dtype):
        if name not in GEMMAS:
            expected[ops.silu_mul] = layers
        else:
            expected[ops.table_mul if dtype is torch.bfloat16 else ops.gelu_mul] = layers
    assert counts(forward._fused) == expected


@pytest.mark.parametrize("name", WITHOUT[:2])
def test_a_model_without_such_chains_runs_as_it_was_traced(name: str) -> None:
    assert not TracedForward(prepared(name, torch.float32), has_kernels=True).unfuse()


@torch.inference_mode()
def logits_of(forward: TracedForward, shape: KVShape, num_rows: int) -> torch.Tensor:
    """Prefill `num_rows` sequences of 4 tokens, 7 at a time, and decode one step of all."""
    kv, starts = make_cache(shape, [5] * num_rows, max_model_len=16, block_size=4)
    generator = torch.Generator().manual_seed(0)

    def run(positions: list[int], due: list[int], step: PackedStep) -> torch.Tensor:
        token_ids = torch.randint(44, 300, (1, len(positions)), generator=generator)
        return forward(token_ids, torch.tensor([positions]), torch.tensor(due), step)

    for first in range(0, num_rows, 7):
        chosen = starts[first : first + 7]
        chunks = tuple(ChunkRows(4 * i, own, 0, 4) for i, own in enumerate(chosen))
        run(list(range(4)) * len(chosen), [0], PackedStep(kv, (), (), chunks))
    step = PackedStep(kv, tuple(starts), (4,) * num_rows, ())
    return run([4] * num_rows, list(range(num_rows)), step)


@exact
@dtypes
@families
def test_fused_steps_give_the_logits_of_the_trace(name: str, dtype: torch.dtype) -> None:
    fused, shape = traced(name, dtype)
    plain = copy(fused)
    assert plain.unfuse()
    for num_rows in (1, 7, 33):
        found, expected = (logits_of(it, shape, num_rows) for it in (fused, plain))
        if name in GEMMAS and dtype is torch.float32:  # GELU is not computed as torch computes it
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, expected), num_rows


@families
def test_a_layers_rotations_are_paired_where_the_operators_have_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpaired, shape = traced(name, torch.float32)

    def rotate_pair(
        heads: torch.Tensor, others: torch.Tensor, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.rotate(heads, *tables), ops.rotate(others, *tables)

    monkeypatch.setattr(ops, "OPERATORS", replace(ops.OPERATORS, rotate_pair=rotate_pair))
    paired = TracedForward(prepared(name, torch.float32), has_kernels=True)
    assert paired._fused is not None
    targets = Counter(node.target for node in paired._fused.graph.nodes)
    assert (targets[rotate_pair], targets[ops.rotate]) == (len(shape.windows), 0)
    found, expected = (logits_of(each, shape, 7) for each in (paired, unpaired))
    assert torch.equal(found, expected)


@exact
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_a_trace_in_bfloat16_stays_fused(name: str) -> None:
    model = prepared(name, torch.bfloat16)
    forward = trace(model, cache_of(model), has_kernels=True)
    assert isinstance(forward, TracedForward)
    assert forward.unfuse()


def test_kernels_that_give_other_values_are_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = replace(ops.OPERATORS, rotate=lambda heads, cosines, _: heads * cosines.unsqueeze(1))
    monkeypatch.setattr(ops, "OPERATORS", wrong)
    model = prepared("qwen2", torch.float32)
    forward = trace(model, cache_of(model), has_kernels=True)
    assert isinstance(forward, TracedForward)
    assert not forward.unfuse()
    assert "operators are not fused: the logits would differ" in caplog.text


def trace_of(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(1, 5, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)),
        (torch.ones(1, 5, 8, dtype=torch.float16), torch.ones(8, dtype=torch.float16)),
        (torch.ones(2, 5, 8), torch.ones(8)),  # two sequences
        (torch.ones(1, 5, 8), torch.ones(5, 8)),  # a weight for each row
        (torch.ones(1, 5, 8), torch.ones(16)[::2]),  # a weight with gaps
    ],
)
def test_norms_of_other_types_and_layouts_stay(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert fuse(trace_of(norm, *inputs), ops.OPERATORS) is None


def test_a_sum_with_other_readers_is_computed_once() -> None:
    def chain(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = one + other
        return torch.cat((total.neg(), norm(total, weight)), -1)

    inputs = (torch.randn(1, 5, 8), torch.randn(1, 5, 8))
    weight = torch.randn(8)
    graph = make_fx(
        lambda one, other: chain(one, other, weight),
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
    )(*inputs)
    fused = fuse(graph, ops.OPERATORS)
    assert counts(fused) == {ops.add_rms_norm: 1}
    assert fused is not None
    assert torch.equal(fused(*inputs), chain(*inputs, weight))


def test_a_chain_that_writes_into_its_input_is_not_fused() -> None:
    def chain(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm(rows.mul_(2), weight)

    assert fuse(trace_of(chain, torch.ones(1, 5, 8), torch.ones(8)), ops.OPERATORS) is None
