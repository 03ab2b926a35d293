import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from deployments.compute.cpu.linear.small_batch_linear import SmallBatchLinear
from deployments.compute.graph_programs import _split_at_kernels
from deployments.compute.kept_files import DIGEST_BYTES, TRACES
from deployments.compute.traced_model import kept_trace
from deployments.compute.traced_model.traced_graph import NotTraceableError
from deployments.engine.attention.attention import ATTENTION_NAME
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.model import traced_forward
from deployments.engine.model.forward import Forward, StockForward
from deployments.engine.model.loader import LoadedModel
from deployments.engine.model.traced_forward import TracedForward, trace
from tests.compute.cpu.fusion.exactness import IS_EXACT
from tests.compute.traced_model.same_program import assert_same_program
from tests.engine.attention.extents import make_cache
from tests.engine.tiny_models import (
    MODELS,
    SHAPE,
    gemma3,
    gpt_oss,
    load,
    mixtral,
    qwen2,
    qwen3_moe,
)
from tests.failing import failing

pytestmark = pytest.mark.slow

MakeModel = Callable[[], PreTrainedModel]


MIXTURES = (mixtral, qwen3_moe, gpt_oss)
TRACEABLE = {name: make for name, make in MODELS.items() if make not in MIXTURES}
NOT_FUSED = ("gpt2", "opt")
"""Those none of whose operators are fused."""

Chunk = tuple[int, int, int]
"""A sequence, and the positions of its chunk."""

STEPS: Sequence[tuple[tuple[int, ...], tuple[int, ...], tuple[Chunk, ...], tuple[int, ...]]] = (
    # Sequences that decode, their positions, the chunks, and the rows that are due.
    ((), (), ((0, 0, 9),), (8,)),
    ((), (), ((1, 0, 1),), (0,)),
    ((0,), (9,), (), (0,)),
    ((0, 1), (10, 1), (), (0, 1)),
    ((0, 1), (11, 2), ((2, 0, 7),), (0, 1)),
    ((0, 1), (12, 3), ((2, 7, 14),), (0, 1, 8)),
)
"""Steps of 9, 1, 1, 2, 9 and 9 rows; some rows lie past a window."""


def shape_of(loaded: LoadedModel) -> KVShape:
    return KVShape.of(loaded.text_config, torch.float32)


def made_of(loaded: LoadedModel, *, has_kernels: bool = True) -> Forward:
    kv, _ = make_cache(shape_of(loaded), [5], max_model_len=32)
    return trace(loaded.model, kv, has_kernels=has_kernels)


@torch.inference_mode()
def logits_of(forward: Forward, loaded: LoadedModel) -> list[torch.Tensor]:
    """Run the steps above on a new KV cache; return each step's logits."""
    kv, starts = make_cache(shape_of(loaded), [14, 5, 14], max_model_len=32, block_size=4)
    generator = torch.Generator().manual_seed(1)
    logits = []
    for decoding, decoded, parts, due in STEPS:
        positions = [*decoded, *(i for _, start, end in parts for i in range(start, end))]
        token_ids = torch.randint(44, 300, (1, len(positions)), generator=generator)
        chunks = tuple(
            ChunkRows(len(decoded), starts[own], start, end) for own, start, end in parts
        )
        step = PackedStep(kv, tuple(starts[i] for i in decoding), decoded, chunks)
        logits.append(forward(token_ids, torch.tensor([positions]), torch.tensor(due), step))
    return logits


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of traces, which is empty."""
    folder = tmp_path / "traces"
    monkeypatch.setattr(kept_trace, "TRACES", replace(TRACES, folder_name=str(folder)))
    return folder


@pytest.mark.parametrize("name", TRACEABLE)
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_traced_forward_gives_the_models_own_logits_to_the_last_bit(
    name: str, is_kept: bool, traces: Path
) -> None:
    if is_kept:
        made_of(load(TRACEABLE[name]))
        assert len(list(traces.iterdir())) == 1
    loaded = load(TRACEABLE[name])
    traced = made_of(loaded)
    assert isinstance(traced, TracedForward)
    assert traced.was_kept is is_kept
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    own = logits_of(StockForward(loaded.model), loaded)
    assert [len(logits[0]) for logits in own] == [len(due) for *_, due in STEPS]
    # Torch's GELU is less exact than the fused one.
    if name.startswith("gemma") or not IS_EXACT:
        for found, expected in zip(logits_of(traced, loaded), own, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert traced.unfuse() is (name not in NOT_FUSED)
    assert all(map(torch.equal, logits_of(traced, loaded), own))


def wide(dtype: torch.dtype) -> LoadedModel:
    """Return a Qwen2 whose layers our kernel takes; oneDNN's adds in another order for few rows."""
    sizes = {"hidden_size": 128, "intermediate_size": 1536, "vocab_size": 384}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**{**SHAPE, **sizes, **heads, "initializer_range": 0.05})
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    return load(lambda: model)


def started_twice(dtype: torch.dtype) -> list[tuple[TracedForward, KVShape]]:
    """Return the passes of a start that traces the wide model, and of one that reads the trace."""
    found = []
    for is_kept in (False, True):
        loaded = wide(dtype)
        shape = KVShape.of(loaded.text_config, dtype)
        forward = trace(loaded.model, make_cache(shape, [5], max_model_len=32)[0], has_kernels=True)
        assert isinstance(forward, TracedForward)
        assert forward.was_kept is is_kept
        found.append((forward, shape))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_start_that_reads_the_trace_runs_the_programs_of_the_start_that_made_it(
    dtype: torch.dtype, traces: Path
) -> None:
    made, read = (forward for forward, _ in started_twice(dtype))
    assert made._fused is not None
    assert read._fused is not None
    assert_same_program(made._graph, read._graph)
    assert_same_program(made._fused, read._fused)
    for parts in zip(*map(_split_at_kernels, (made._fused, read._fused)), strict=True):
        assert_same_program(*parts)


@torch.inference_mode()
def logits_by_token(forward: TracedForward, shape: KVShape, num_prefilled: int) -> torch.Tensor:
    """Prefill some of 20 tokens, and decode the others, by a program if there are; [20, vocab]."""
    token_ids = list(range(44, 64))
    kv, (start,) = make_cache(shape, [len(token_ids)], max_model_len=32)
    rows = torch.arange(num_prefilled)
    prefill = PackedStep(kv, (), (), (ChunkRows(0, start, 0, num_prefilled),))
    logits = [*forward(torch.tensor([token_ids[:num_prefilled]]), rows[None], rows, prefill)[0]]
    replay = forward.open_replay(kv, 1)
    for position in range(num_prefilled, len(token_ids)):
        step = PackedStep(kv, (start,), (position,), ())
        found = None if replay is None else replay.run([token_ids[position]], step)
        if found is None:
            given = torch.tensor([[token_ids[position]]]), torch.tensor([[position]])
            found = forward(*given, torch.tensor([0]), step)[0]
        logits += found
    return torch.stack([each.float() for each in logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_that_moves_between_such_starts_has_the_same_logits_to_the_last_bit(
    dtype: torch.dtype, traces: Path
) -> None:
    """What one replica has decoded, the other one prefills."""
    passes = started_twice(dtype)
    if not any(isinstance(child, SmallBatchLinear) for child in passes[0][0]._graph.children()):
        pytest.skip("oneDNN's linear layers, which this processor keeps, add in no fixed order")
    expected = logits_by_token(*passes[0], 1)
    for each in passes:
        for num_prefilled in (1, 2, 9, 20):
            assert torch.equal(logits_by_token(*each, num_prefilled), expected), num_prefilled


def test_a_trace_uses_weights_that_change_later() -> None:
    loaded = load(qwen2)
    traced = made_of(loaded)
    assert isinstance(traced, TracedForward)
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight").mul_(2)
    own = logits_of(StockForward(loaded.model), loaded)
    if not IS_EXACT:
        assert traced.unfuse()
    assert all(map(torch.equal, logits_of(traced, loaded), own))


@pytest.mark.parametrize("make_model", MIXTURES)
def test_a_mixture_of_experts_keeps_its_own_forward_pass(
    make_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(make_model)
    with caplog.at_level(logging.INFO):
        assert isinstance(made_of(loaded), StockForward)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "the forward pass is not traced" in record.message


def wrapped(change: Callable[[torch.Tensor], torch.Tensor]) -> LoadedModel:
    """Return a Qwen2 whose last norm's output is changed."""
    loaded = load(qwen2)
    norm = loaded.model.get_submodule("model.norm")
    stock = norm.forward
    norm.forward = lambda rows: change(stock(rows))
    return loaded


def by_num_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows.shape[1] > 4 else rows


def by_even_num_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.shape[1] % 2 else rows * 2


def by_value(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows[0, 0, 0] > 0 else rows


def by_chosen_rows(rows: torch.Tensor) -> torch.Tensor:
    output = rows.clone()
    chosen = (rows[0, :, 0] > 0).nonzero().flatten()
    for row in chosen.tolist():
        output[0, row] *= 2
    return output


def by_kept_rows(rows: torch.Tensor) -> torch.Tensor:
    """Select rows by their values and join them with the others, as some mixtures of experts do."""
    is_high = rows[0, :, 0] > 0
    return torch.cat([rows[:, is_high] * 2, rows[:, ~is_high]], dim=1)[:, : rows.shape[1]]


CHANGES = (by_num_rows, by_even_num_rows, by_value, by_chosen_rows, by_kept_rows)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_control_flow_depends_on_its_input_is_not_traced(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    loaded = wrapped(change)
    with pytest.raises(NotTraceableError):
        TracedForward(loaded.model, has_kernels=True)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    assert isinstance(made_of(loaded), StockForward)


def test_a_dependence_on_the_number_of_rows_is_named() -> None:
    with pytest.raises(NotTraceableError, match=r"depends on the number of rows: .*> 4"):
        TracedForward(wrapped(by_num_rows).model, has_kernels=True)


def test_a_failed_trace_does_not_hinder_the_next(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(NotTraceableError, match="a model's bug"):
        TracedForward(wrapped(failing(KeyError("a model's bug"))).model, has_kernels=True)
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled
    assert isinstance(made_of(load(gemma3)), TracedForward)


class Twisted(TracedForward):
    """A trace that silently gives wrong logits."""

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return super().__call__(*arguments) * 1.01


def test_a_trace_that_gives_other_logits_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traced_forward, "TracedForward", Twisted)
    with caplog.at_level(logging.WARNING):
        assert isinstance(made_of(load(qwen2)), StockForward)
    assert "its logits would differ" in caplog.text


class Failing(TracedForward):
    """A trace whose fused operators raise."""

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if self.is_fused:
            raise RuntimeError("a kernel's bug")
        return super().__call__(*arguments)


def test_a_failure_of_a_cpus_fused_operators_stops_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traced_forward, "TracedForward", Failing)
    with pytest.raises(RuntimeError, match="a kernel's bug"):
        made_of(load(qwen2))


class FusedAsOnAGpu(TracedForward):
    """A trace with fused operators that a GPU may not run; `error` is what they raise."""

    error: Exception

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._fused = self._graph

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if self.is_fused:
            raise self.error
        return super().__call__(*arguments)


def test_a_gpu_that_can_not_run_fused_operators_does_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FusedAsOnAGpu, "error", OSError("no C compiler"), raising=False)
    monkeypatch.setattr(traced_forward, "TracedForward", FusedAsOnAGpu)
    traced = made_of(load(qwen2), has_kernels=False)
    assert isinstance(traced, TracedForward)
    assert not traced.is_fused
    assert "fused operators fail here" in caplog.text
    assert "no C compiler" in caplog.text


def test_a_gpu_whose_memory_runs_out_is_not_taken_for_one_without_fused_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FusedAsOnAGpu, "error", torch.OutOfMemoryError("no room"), raising=False)
    monkeypatch.setattr(traced_forward, "TracedForward", FusedAsOnAGpu)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        made_of(load(qwen2), has_kernels=False)


def test_state_that_changed_while_tracing_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def by_call(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return rows * len(calls)

    with caplog.at_level(logging.WARNING):
        assert isinstance(made_of(wrapped(by_call)), StockForward)
    assert "its logits would differ" in caplog.text


@pytest.mark.parametrize("other", [b"fused gelu_mul", b"torch aten.slice.Tensor"])
def test_a_kept_trace_that_gives_other_logits_or_fails_is_made_again(
    other: bytes, traces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made_of(load(qwen2))
    (path,) = traces.iterdir()
    stored = path.read_bytes()
    twisted = stored[DIGEST_BYTES:].replace(b"fused silu_mul", other)
    assert twisted != stored[DIGEST_BYTES:]
    path.write_bytes(sha256(twisted).digest() + twisted)
    with caplog.at_level(logging.WARNING):
        traced = made_of(load(qwen2))
    assert isinstance(traced, TracedForward)
    assert not traced.was_kept
    assert "traced again" in caplog.text
    assert path.read_bytes() == stored
