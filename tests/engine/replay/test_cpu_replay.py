"""Decode steps as programs, compared with the same steps call by call."""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deployments.compute import graph_programs
from deployments.compute.cpu.jit.kernel_program import can_run
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.compute.cpu.linear.tiling import find_arithmetic
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, prepare_model
from deployments.engine.model.runner import StepLogits
from deployments.engine.replay.cpu_replay import CpuDecodeReplay
from deployments.engine.scheduling.scheduler import StepPlan
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.processor import features
from tests.engine.collector import Collector
from tests.engine.tiny_models import byte_tokenizer

DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if find_arithmetic(features(), is_bfloat16=dtype is torch.bfloat16) and can_prepack(dtype)
]
"""The dtypes for which this processor has kernels; without any, no test here is collected."""

pytestmark = [
    pytest.mark.usefixtures("shared_traces", "threads"),
    pytest.mark.skipif(
        not can_run() or not DTYPES, reason="needs a processor with AVX2, and torch on libgomp"
    ),
]

MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 48
SHAPE: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=12))


def gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=12,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    )
    return Gemma3ForCausalLM(config)


FAMILIES = (qwen2, qwen3, llama, mistral, gemma3)

MakeModel = Callable[[], PreTrainedModel]


@cache
def load(
    make_model: MakeModel, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> LoadedModel:
    """Make a model once; no test changes it."""
    return made(make_model, dtype, quantization)


def made(
    make_model: MakeModel, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> LoadedModel:
    torch.manual_seed(0)
    model = make_model()
    torch.nn.Module.to(model, dtype)  # transformers wraps its own, which has no such type
    prepare_model(model, quantization)
    return LoadedModel(model, byte_tokenizer(), None, frozenset())


def engine_of(loaded: LoadedModel, *, with_programs: bool = True) -> Engine:
    engine = Engine(loaded, EngineLimits(MAX_NUM_SEQS, MAX_MODEL_LEN, 16, block_size=8))
    engine.warm_up()
    if not with_programs:
        engine._runner._replay = None
    return engine


def replay_of(engine: Engine) -> CpuDecodeReplay:
    replay = engine._runner._replay
    assert isinstance(replay, CpuDecodeReplay)
    return replay


def memory_of(replay: CpuDecodeReplay) -> graph_programs._BufferPool:
    assert replay._graph is not None
    return replay._graph._memory


def request(name: str, length: int, num_tokens: int, seed: int = 0) -> SequenceRequest:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(44, 300, (length,), generator=generator).tolist()
    params = SamplingParams(temperature=1, seed=seed, max_tokens=num_tokens, ignore_eos=True)
    return SequenceRequest(name, tuple(prompt), params)


def tokens_of(collector: Collector) -> dict[str, list[int]]:
    assert all(delta.error is None for deltas in collector.deltas.values() for delta in deltas)
    return {name: collector.token_ids(name) for name in collector.deltas}


def finish(engine: Engine) -> dict[str, list[int]]:
    collector = Collector(engine)
    collector.run()
    return tokens_of(collector)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(make, marks=() if make in (qwen2, gemma3) else pytest.mark.slow)
        for make in FAMILIES
    ],
    ids=lambda make: make.__name__,
)
def engines(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[Engine, Engine]:
    """Return an engine that runs programs, and one that does not."""
    loaded = load(request.param, dtype)
    return engine_of(loaded), engine_of(loaded, with_programs=False)


@st.composite
def some_arrivals(draw: st.DrawFn) -> list[tuple[int, SequenceRequest]]:
    """Draw sequences, each with the step before which it arrives."""
    number = draw(st.integers(1, 7))
    return [
        (
            draw(st.integers(0, 20)),
            request(
                str(i), draw(st.integers(1, 20)), draw(st.integers(1, 25)), draw(st.integers(0, 9))
            ),
        )
        for i in range(number)
    ]


def run(engine: Engine, arrivals: list[tuple[int, SequenceRequest]]) -> dict[str, list[int]]:
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    collector = Collector(engine)
    for step in count():
        while waiting and waiting[0][0] <= step:
            engine.add(waiting.pop(0)[1])
        if not waiting:
            break
        collector.step()
    collector.run()
    return tokens_of(collector)


@settings(max_examples=10, deadline=None)
@given(arrivals=some_arrivals(), num_threads=st.integers(1, 2))
def test_programs_give_the_same_tokens_as_call_by_call(
    engines: tuple[Engine, Engine], arrivals: list[tuple[int, SequenceRequest]], num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    found, expected = (run(engine, arrivals) for engine in engines)
    assert found == expected


def test_late_threads_change_nothing(engines: tuple[Engine, Engine]) -> None:
    """With more threads than cores some are late, and their calls are executed again."""
    arrivals = [(i, request(str(i), 5, 40, seed=i)) for i in range(MAX_NUM_SEQS)]
    expected = run(engines[1], arrivals)
    torch.set_num_threads(4)
    assert run(engines[0], arrivals) == expected


def test_each_size_of_a_step_has_a_program(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    for i in range(MAX_NUM_SEQS):
        engine.add(request(str(i), 4, 4 + 2 * i))
    finish(engine)
    sizes = {size for size, _ in replay_of(engine)._programs}
    assert sizes == set(range(1, MAX_NUM_SEQS + 1))
    assert not replay_of(engine)._refused


@pytest.mark.slow
@pytest.mark.parametrize(("make_model", "quantization"), [(qwen2, "int4"), (gemma3, "int8")])
def test_steps_on_quantized_weights_are_programs(
    make_model: MakeModel, quantization: str, dtype: torch.dtype
) -> None:
    loaded = load(make_model, dtype, quantization)
    engine, plain = engine_of(loaded), engine_of(loaded, with_programs=False)
    for each in (engine, plain):
        for i in range(MAX_NUM_SEQS):
            each.add(request(str(i), 4, 4 + 2 * i))
    assert finish(engine) == finish(plain)
    assert {rows for rows, _ in replay_of(engine)._programs} == {1, 2, 3, 4}
    assert not replay_of(engine)._refused


def test_steps_of_a_power_of_two_need_not_be_captured_when_they_first_run(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(load(qwen2, dtype))
    captured: list[int] = []
    capture = graph_programs.GraphPrograms.capture

    def noted(self: Any, inputs: Any, attend: Any, num_rows: int) -> Any:
        captured.append(num_rows)
        return capture(self, inputs, attend, num_rows)

    monkeypatch.setattr(graph_programs.GraphPrograms, "capture", noted)
    for i in range(MAX_NUM_SEQS):
        engine.add(request(str(i), 4, 4 + 2 * i))
    finish(engine)
    assert captured == [3]
    assert not replay_of(engine)._refused


def logits_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Run some sequences; return each step's logits as they are after the last step."""
    held: list[torch.Tensor] = []
    run_plan = engine._recovery._run

    def kept(plan: StepPlan) -> StepLogits | None:
        found = run_plan(plan)
        assert found is not None
        held.append(found.logits)
        return found

    monkeypatch.setattr(engine._recovery, "_run", kept)
    for i in range(3):
        engine.add(request(str(i), 3, 4 + 9 * i))
    finish(engine)
    return held


def test_the_logits_are_the_same_to_the_last_bit_and_not_overwritten(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = (logits_of(engine, monkeypatch) for engine in engines)
    assert len(found) == len(expected) > 20
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_buffers_are_reused_from_layer_to_layer() -> None:
    def buffers(num_layers: int) -> list[tuple[int, int]]:
        shape = {**SHAPE, "num_hidden_layers": num_layers}
        engine = engine_of(made(lambda: Qwen2ForCausalLM(Qwen2Config(**shape))))
        for i in range(MAX_NUM_SEQS):
            engine.add(request(str(i), 4, 4 + 2 * i))
        finish(engine)
        free = memory_of(replay_of(engine))._free
        return sorted((row_bytes, len(found)) for row_bytes, found in free.items())

    assert buffers(8) == buffers(16)  # two epochs and four


def test_dropped_programs_are_captured_again(dtype: torch.dtype) -> None:
    """Step recovery drops them to free memory."""
    engine = engine_of(load(qwen2, dtype))
    engine.add(request("a", 5, 8))
    expected = finish(engine)
    assert engine.num_captured
    engine._runner.drop_captured()
    assert not replay_of(engine)._programs
    assert not memory_of(replay_of(engine))._free
    engine.add(request("a", 5, 8))
    assert finish(engine) == expected
    assert engine.num_captured == 1


def test_a_model_that_computes_between_kernels_runs_call_by_call(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel takes no layer of 100 outputs, so one is torch's own."""
    config = Qwen2Config(**{**SHAPE, "intermediate_size": 100})
    loaded = made(lambda: Qwen2ForCausalLM(config), dtype)
    caplog.set_level(logging.INFO)
    engine = engine_of(loaded)
    engine.add(request("a", 5, 8))
    found = finish(engine)
    assert not replay_of(engine)._programs
    assert "call by call" in caplog.text
    plain = engine_of(loaded, with_programs=False)
    plain.add(request("a", 5, 8))
    assert found == finish(plain)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Keeps the shapes of cloned tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten.clone.default:
            self.shapes.append(args[0].shape)
        found: torch.Tensor = func(*args, **(kwargs or {}))
        return found


def test_plain_linear_layers_run_call_by_call_and_their_weights_are_not_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain layer's product reads a view of the weight, and the number of rows that are due."""
    monkeypatch.setattr(PrepackedLinear, "fits", lambda _: False)
    caplog.set_level(logging.INFO)
    loaded = made(qwen2)
    engine = engine_of(loaded)
    engine.add(request("a", 5, 8))
    with Copies() as copies:
        found = finish(engine)
    assert torch.Size([64, 64]) not in copies.shapes
    messages = [r.message for r in caplog.records if "call by call" in r.message]
    assert messages
    assert all("addmm" in message and "\n" not in message for message in messages)
    plain = engine_of(loaded, with_programs=False)
    plain.add(request("a", 5, 8))
    assert found == finish(plain)


def test_without_a_pool_of_threads_steps_run_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_programs, "can_run", lambda: False)
    engine = engine_of(load(qwen2))
    engine.add(request("a", 5, 8))
    assert len(finish(engine)["a"]) == 8
    assert not replay_of(engine)._programs


def test_one_sequence_runs_alone_where_a_single_row_is_padded_to_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.engine.model.runner.is_single_row_exact", lambda _: False)
    engine = Engine(load(qwen2), EngineLimits(1, MAX_MODEL_LEN, 16, block_size=8))
    engine.warm_up()
    engine.add(request("s", 5, 6))
    assert len(finish(engine)["s"]) == 6
    assert [rows for rows, _ in replay_of(engine)._programs] == [2]


def test_an_error_while_capturing_leaves_nothing_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step recovery runs the step again."""
    engine = engine_of(load(qwen2))
    failures = iter([MemoryError("no memory")])

    def take(self: object, row_bytes: int) -> torch.Tensor:
        for failure in failures:
            raise failure
        return stock(self, row_bytes)

    stock: Callable[..., torch.Tensor] = graph_programs._BufferPool.take
    monkeypatch.setattr(graph_programs._BufferPool, "take", take)
    engine.add(request("a", 5, 8))
    found = finish(engine)
    monkeypatch.undo()
    plain = engine_of(load(qwen2), with_programs=False)
    plain.add(request("a", 5, 8))
    assert found == finish(plain)
    assert replay_of(engine)._programs
