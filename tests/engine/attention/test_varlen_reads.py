import logging
from typing import Any

import pytest
import torch

from deployments.engine.attention import varlen_reads
from deployments.engine.attention.kv_slots import KVShape
from deployments.engine.attention.varlen_reads import SlotReads, can_read_slots
from deployments.engine.model import runner
from tests.engine.fake_graphs import FakeCapturer
from tests.engine.fake_varlen import FakeVarlen
from tests.engine.replay.test_cuda_graphs import Decoding, answers, capturer, prompts
from tests.engine.tiny_models import MODELS, gemma2, generate, load, make_engine, qwen2

pytestmark = pytest.mark.slow

__all__ = ["capturer"]  # a fixture

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = KVShape((None,), num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LOOKING = {"gpt2"}
SOFTCAPPED = {"gemma2"}


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> FakeVarlen:
    """Let captured steps read their slots by length."""
    monkeypatch.setattr(runner, "can_read_slots", lambda shape, num_heads, device: True)
    return FakeVarlen(monkeypatch)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the comparison on this machine, as if it were a GPU."""
    compare = varlen_reads._error
    monkeypatch.setattr(varlen_reads, "_error", lambda shape, heads, _: compare(shape, heads, CPU))


@pytest.mark.parametrize("name", MODELS)
def test_steps_that_read_by_length_give_what_generate_gives(
    name: str, capturer: FakeCapturer, varlen: FakeVarlen
) -> None:
    make_model, asked = MODELS[name], prompts(5)
    engine = make_engine(load(make_model), num_slots=3)
    engine.warm_up()
    given = answers(engine, asked, 12)
    assert given == {key: generate(make_model, prompt, 12) for key, prompt in asked.items()}
    assert (varlen.num_calls > 0) == (name not in SOFTCAPPED)


@pytest.mark.parametrize("slots", [(0,), (0, 2), (1, 3), (0, 1, 2, 3)])
def test_rows_of_any_slots_give_the_logits_of_a_plain_step(
    slots: tuple[int, ...], varlen: FakeVarlen
) -> None:
    decoding = Decoding(qwen2, 4)
    expected = decoding.plain_logits(*slots)
    for _ in range(2):
        torch.testing.assert_close(decoding.logits(*slots), expected, rtol=1e-4, atol=1e-4)
    assert varlen.num_calls > 0


def test_after_a_failed_capture_steps_are_captured_with_a_mask(
    varlen: FakeVarlen, caplog: pytest.LogCaptureFixture
) -> None:
    decoding = Decoding(qwen2, 2)
    expected = decoding.plain_logits(0, 1)
    decoding.capturer.error = RuntimeError("operation not permitted when stream is capturing")
    torch.testing.assert_close(decoding.logits(0, 1), expected, rtol=1e-4, atol=1e-4)
    assert "with a mask from now on" in caplog.text
    decoding.capturer.error, num_calls = None, varlen.num_calls
    for _ in range(2):
        torch.testing.assert_close(decoding.logits(0, 1), expected, rtol=1e-4, atol=1e-4)
    assert decoding.capturer.num_replays == 1
    assert varlen.num_calls == num_calls


def test_softcapped_scores_are_still_read_with_a_mask(varlen: FakeVarlen) -> None:
    Decoding(gemma2, 1).logits(0)
    assert varlen.num_calls == 0


def test_lengths_are_cut_to_the_slot_and_starts_are_a_slot_apart() -> None:
    reads = SlotReads.of(torch.tensor([1, 9, 40]), capacity=16, longest=16)
    assert reads.query_starts.tolist() == [0, 1, 2, 3]
    assert reads.slot_starts.tolist() == [0, 16, 32, 48]
    assert reads.lengths.tolist() == [1, 9, 16]


@pytest.mark.usefixtures("varlen", "on_a_cpu")
@pytest.mark.parametrize("num_heads", [2, 6])
def test_reads_that_agree_with_masked_attention_are_used(num_heads: int) -> None:
    assert can_read_slots(SHAPE, num_heads, GPU)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_reads_that_give_other_results_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float
) -> None:
    right = FakeVarlen(monkeypatch)

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return right(*arguments, **options) * factor

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
    assert not can_read_slots(SHAPE, 4, GPU)
    assert "varlen_attn is off by" in caplog.text


@pytest.mark.usefixtures("on_a_cpu")
def test_reads_that_fail_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not can_read_slots(SHAPE, 4, GPU)  # torch's varlen_attn has no kernel for a CPU
    assert "varlen_attn fails here" in caplog.text


@pytest.mark.usefixtures("varlen")
def test_a_cpu_and_unsupported_dtypes_are_not_tried() -> None:
    assert not can_read_slots(SHAPE, 4, CPU)
    float32 = KVShape((None,), num_kv_heads=2, head_dim=8, dtype=torch.float32)
    assert not can_read_slots(float32, 4, GPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(14, 2, 64), (28, 4, 128)])
def test_a_gpu_reads_slots_by_length(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = KVShape((None,), num_kv_heads, head_dim, torch.bfloat16)
    assert can_read_slots(shape, num_heads, GPU)
