import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deployments.compute.traced_graph import NotTraceableError
from deployments.engine.attention.attention import ATTENTION_NAME
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.model import traced_forward
from deployments.engine.model.forward import Forward, StockForward
from deployments.engine.model.loader import LoadedModel
from deployments.engine.model.traced_forward import TracedForward, trace
from tests.compute.cpu.fusion.exactness import IS_EXACT
from tests.engine.attention.extents import make_cache
from tests.engine.tiny_models import MODELS, gemma3, gpt_oss, load, mixtral, qwen2, qwen3_moe
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


def made_of(loaded: LoadedModel) -> Forward:
    kv, _ = make_cache(shape_of(loaded), [5], max_model_len=32)
    return trace(loaded.model, kv, has_kernels=True)


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


@pytest.mark.parametrize("name", TRACEABLE)
def test_a_traced_forward_gives_the_models_own_logits_to_the_last_bit(name: str) -> None:
    loaded = load(TRACEABLE[name])
    traced = made_of(loaded)
    assert isinstance(traced, TracedForward)
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    own = logits_of(StockForward(loaded.model), loaded)
    assert [len(logits[0]) for logits in own] == [len(due) for *_, due in STEPS]
    # Torch's GELU is less exact than the fused one.
    if name.startswith("gemma") or not IS_EXACT:
        for found, expected in zip(logits_of(traced, loaded), own, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert traced.unfuse() is (name not in NOT_FUSED)
    assert all(map(torch.equal, logits_of(traced, loaded), own))


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


def test_state_that_changed_while_tracing_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def by_call(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return rows * len(calls)

    with caplog.at_level(logging.WARNING):
        assert isinstance(made_of(wrapped(by_call)), StockForward)
    assert "its logits would differ" in caplog.text
