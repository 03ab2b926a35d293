"""How many launches a layer costs on a GPU, with `meta` in place of one.

On a GPU each operator that is not a view is a launch, and a decode step of few rows takes as long
as its launches. The CPU's benchmarks can't see them, so each kind of step has a budget here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.gpu.shapes import TINY, TINY_GEMMA3
from deployments.compute.fusion.fuse import fuse
from deployments.compute.fusion.fused_operators import FusedOperators
from deployments.compute.merged_linear import merge_plainly
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.attention.attention import ATTENTION_NAME, register_attention
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.attention.varlen_reads import ExtentReads
from deployments.engine.model import traced_forward
from deployments.engine.model.traced_forward import TracedForward
from deployments.engine.replay.cuda_mixed import MixedSize, MixedSteps, StaticMixedStep
from deployments.engine.replay.static_decode import CudaStaticDecodeStep
from deployments.engine.sampling import sampler
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import sample
from deployments.engine.sampling.stable_top_k import argmax
from deployments.engine.scheduling.token_counts import TokenCounts
from deployments.plan.graph_sizes import DecodeBucket
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout
from tests.engine.fake_varlen import FakeVarlen
from tests.engine.test_device_placement import META

VIEWS = frozenset(
    {"_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select", "slice"}
    | {"split", "split_with_sizes", "t", "transpose", "unbind", "unsqueeze", "view"}
)
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
HOST_READS = frozenset({"_local_scalar_dense", "is_nonzero", "item"})
HOST_VALUES = frozenset({"detach_", "lift_fresh"})
"""What `torch.tensor` ends with; it makes the numbers on the host."""
COPIES = frozenset({"_to_copy", "copy_", "to"})

FLASH_LAUNCHES = 5
"""Launches of flash attention with one query a row: copies of the queries and of the output, parts,
their sum, and a fill. With chunks it is one.
Source: torch, flash_api.cpp, mha_varlen_fwd."""

ROW_LAUNCHES = 2
"""Launches of our own attention of decode rows: parts and their sum."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Counts launches, and refuses reads on the host and copies from it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS | ALLOCATIONS:
            self.counts[name] += 1
        assert name not in HOST_READS | HOST_VALUES, name
        given = func(*args, **(kwargs or {}))
        if name in COPIES:
            tensors = [each for each in (*args, given) if isinstance(each, torch.Tensor)]
            assert len({each.device for each in tensors}) == 1, f"{name} between devices"
        return given


class Fused:
    """The GPU's fused operators, counted and without values."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def operators(self) -> FusedOperators:
        def made(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                self.counts[name] += 1
                return of(*arguments)

            return run

        def like(rows: torch.Tensor, *others: Any) -> torch.Tensor:
            return torch.empty_like(rows, memory_format=torch.contiguous_format)

        def half(joined: torch.Tensor) -> torch.Tensor:
            return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)

        def twice(rows: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return like(rows), like(rows)

        return FusedOperators(
            "meta",
            16_384,
            made("rms_norm", like),
            made("add_rms_norm", twice),
            made("rotate", like),
            made("silu_mul", half),
            made("gelu_mul", half),
            rotate_pair=made("rotate_pair", lambda heads, others, *_: (like(heads), like(others))),
        )

    def store(self, *_: torch.Tensor) -> None:
        self.counts["store"] += 1

    def attend_rows(self, query: torch.Tensor, *_: Any) -> torch.Tensor:
        self.counts["attend_rows"] += ROW_LAUNCHES
        return torch.empty_like(query, memory_format=torch.contiguous_format)


def qwen2(num_layers: int) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**TINY.options, "num_hidden_layers": num_layers}))


def gemma3(num_layers: int) -> PreTrainedModel:
    layer_types = ["sliding_attention"] * (num_layers - 1) + ["full_attention"]
    options = {"num_hidden_layers": num_layers, "layer_types": layer_types}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**TINY_GEMMA3.options, **options}))


class Steps:
    """A model traced as on a GPU, and its steps."""

    def __init__(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        register_attention()
        self.fused, self.varlen = Fused(), FakeVarlen(monkeypatch, device="meta")
        operators = self.fused.operators()
        monkeypatch.setattr(traced_forward, "fuse_on_gpu", lambda graph, *_: fuse(graph, operators))
        torch.nn.Module.to(model, META, torch.bfloat16)
        model.train(mode=False).set_attn_implementation(ATTENTION_NAME)
        merge_plainly(model)
        shape = KVShape.of(model.config, torch.bfloat16)
        capacities = shape.group_capacities(400)
        layout = KVLayout(capacities, (20,) * len(capacities))
        self.kv = KVCache(
            shape,
            layout,
            max_model_len=400,
            device=META,
            reads_by_length=True,
            store=self.fused.store,
            attend_rows=self.fused.attend_rows,
        )
        self.forward = TracedForward(model, has_kernels=False)
        assert self.forward.is_fused
        self.num_layers: int = model.config.num_hidden_layers

    def launches(self, step: PackedStep) -> int:
        """Return the launches of a step, apart from those that make its places."""
        self.fused.counts.clear()
        self.varlen.num_calls = 0
        num_rows = step.num_decode + sum(chunk.end - chunk.start for chunk in step.chunks)
        if isinstance(step, StaticMixedStep):
            num_rows = len(step.inputs.token_ids)
        token_ids = torch.zeros(1, num_rows, dtype=torch.int64, device=META)
        due = torch.zeros(1, dtype=torch.int64, device=META)
        for capacity in self.kv.layout.capacities:
            step.reads(capacity)
        with torch.inference_mode(), Launches() as launches:
            self.forward(token_ids, token_ids, due, step)
        is_flash = step.num_decode and not isinstance(step, CudaStaticDecodeStep)
        num_decode_calls = self.num_layers if is_flash else 0
        counted: int = launches.counts.total() + self.fused.counts.total()
        return counted + (FLASH_LAUNCHES - 1) * num_decode_calls + self.varlen.num_calls

    def captured(self) -> PackedStep:
        lengths = torch.zeros(4, dtype=torch.int64, device=META)
        starts = torch.zeros(self.kv.num_groups, 4, dtype=torch.int64, device=META)
        return CudaStaticDecodeStep.of(self.kv, DecodeBucket(4, 400), lengths, starts)

    def captured_mixed(self) -> PackedStep:
        return MixedSteps(self.kv, 4, 64).static_step(MixedSize(64))

    def mixed(self, num_decode: int, *lengths: int) -> PackedStep:
        chunks, row = list[ChunkRows](), num_decode
        for i, length in enumerate(lengths):
            chunks.append(ChunkRows(row, self._starts(10 + 2 * i), 0, length))
            row += length
        rows = tuple(self._starts(i) for i in range(num_decode))
        return PackedStep(self.kv, rows, (9,) * num_decode, tuple(chunks))

    def _starts(self, block: int) -> tuple[int, ...]:
        return (block * BLOCK_SIZE,) * self.kv.num_groups


MakeModel = Callable[[int], PreTrainedModel]


def per_layer(
    make_model: MakeModel,
    make_step: Callable[[Steps], PackedStep],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_fused: bool = True,
) -> float:
    """Return the launches of a layer: what more layers cost more."""
    counts = []
    for num_layers in (2, 4):
        steps = Steps(make_model(num_layers), monkeypatch)
        if not is_fused:
            steps.forward.unfuse()
        counts.append(steps.launches(make_step(steps)))
    return (counts[1] - counts[0]) / 2


families = pytest.mark.parametrize(
    ("make_model", "budget"), [(qwen2, 9), (gemma3, 13)], ids=["Qwen 2", "Gemma 3"]
)
"""What a layer launches besides attention: four products, a rotation, a gate and a store; and two
norms, or six with those of heads and of what is added."""


@families
def test_a_captured_decode_step_stays_within_its_launches(
    make_model: MakeModel, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert per_layer(make_model, Steps.captured, monkeypatch) <= budget + ROW_LAUNCHES


@families
def test_a_captured_mixed_step_costs_a_single_launch_of_flash_attention(
    make_model: MakeModel, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert per_layer(make_model, Steps.captured_mixed, monkeypatch) <= budget + 1


@families
@pytest.mark.parametrize("lengths", [(20,), (20, 7, 30, 12)])
def test_a_mixed_step_costs_the_same_whatever_its_number_of_prompts(
    make_model: MakeModel, budget: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = per_layer(make_model, lambda steps: steps.mixed(4, *lengths), monkeypatch)
    # Two calls of flash attention, and both outputs joined.
    assert found <= budget + FLASH_LAUNCHES + 2


def test_a_chunk_that_leaves_its_window_costs_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = per_layer(gemma3, lambda steps: steps.mixed(4, 60, 50), monkeypatch)
    assert found <= 20 + 6  # for keys and for values: the tail, the join and their order


@families
def test_a_layer_without_fused_operators_would_break_the_budget(
    make_model: MakeModel, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = per_layer(make_model, Steps.captured, monkeypatch, is_fused=False)
    assert budget + ROW_LAUNCHES + 20 < found <= {9: 37, 13: 81}[budget]


def on_the_host(reads: ExtentReads) -> ExtentReads:
    return replace(reads, query_starts=torch.zeros(5, dtype=torch.int32))


def wide(reads: ExtentReads) -> ExtentReads:
    return replace(reads, lengths=reads.lengths.long())


def too_short(reads: ExtentReads) -> ExtentReads:
    return replace(reads, starts=reads.starts[1:])


@pytest.mark.parametrize("break_it", [on_the_host, wide, too_short])
def test_what_flash_attention_would_refuse_or_misread_raises(
    break_it: Callable[[ExtentReads], ExtentReads], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(qwen2(2), monkeypatch)
    steps.kv.attend_rows = None
    right = ExtentReads.of_rows
    monkeypatch.setattr(ExtentReads, "of_rows", lambda *numbers: break_it(right(*numbers)))
    with pytest.raises(AssertionError):
        steps.launches(steps.captured())


def read_by_the_host(reads: ExtentReads) -> None:
    reads.lengths[0].item()


def made_on_the_host(reads: ExtentReads) -> None:
    torch.tensor([1, 2], device=META)


def copied_to_the_device(reads: ExtentReads) -> None:
    torch.zeros(2).to(META)


def copied_into_a_tensor(reads: ExtentReads) -> None:
    reads.lengths.copy_(torch.zeros(reads.lengths.shape, dtype=torch.int32))


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (read_by_the_host, "item"),
        (made_on_the_host, "detach_"),
        (copied_to_the_device, "to between devices"),
        (copied_into_a_tensor, "copy_ between devices"),
    ],
)
@pytest.mark.parametrize("make_step", [Steps.captured, Steps.captured_mixed])
def test_a_captured_step_that_waits_for_the_host_raises(
    wait: Callable[[ExtentReads], None],
    name: str,
    make_step: Callable[[Steps], PackedStep],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(qwen2(2), monkeypatch)
    step, right = make_step(steps), ExtentReads.attend

    def attend(reads: ExtentReads, *arguments: Any) -> torch.Tensor:
        wait(reads)
        return right(reads, *arguments)

    monkeypatch.setattr(ExtentReads, "attend", attend)
    with pytest.raises(AssertionError, match=f"^{name}"):
        steps.launches(step)


QWEN_DEFAULTS = SamplingParams(
    temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, seed=3
)
"""What Qwen2.5-Instruct's generation_config.json sets."""


def launches_of_sampling(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the launches that follow a step of eight sequences with tokens that are counted."""
    look = torch.Tensor.tolist

    def made_up(tensor: torch.Tensor) -> Any:
        return look(torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", made_up)
    counted = [TokenCounts(range(100 + i), (7,)) for i in range(8)]
    counts = DeviceCounts(META)
    rows = [SamplingRow(params, 5, each if params.has_penalties else None) for each in counted]
    logits = torch.zeros(len(rows), 152_064, device=META)
    sample(logits, rows, counts)
    for each in counted:
        each.add(9)
    with LaunchesOnMeta() as launches:
        sample(logits, rows, counts)
    total: int = launches.counts.total()
    return total


class LaunchesOnMeta(Launches):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Counts launches; numbers may come from the host, as the sampler's parameters do."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = made if isinstance(made, tuple | list) else (made, *args)
        on_device = any(isinstance(each, torch.Tensor) and each.is_meta for each in given)
        if on_device and name not in VIEWS | ALLOCATIONS | HOST_VALUES:
            self.counts[name] += 1
        return made


SAMPLING_BUDGETS = [
    (SamplingParams(temperature=0), 8),
    (SamplingParams(temperature=1, seed=3), 54),
    (QWEN_DEFAULTS, 110),
    (SamplingParams(temperature=1, top_p=0.9, seed=3), 95),
]


@pytest.mark.parametrize(("params", "budget"), SAMPLING_BUDGETS)
def test_sampling_stays_within_its_launches(
    params: SamplingParams, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert budget - 8 < launches_of_sampling(params, monkeypatch) <= budget


def test_an_operator_more_breaks_the_budget_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return argmax(values + 0)

    monkeypatch.setattr(f"{sampler.__name__}.argmax", one_more)
    params, budget = SAMPLING_BUDGETS[0]
    assert launches_of_sampling(params, monkeypatch) > budget
