import logging
from typing import Any

import pytest
import torch

from deployments.engine.attention import varlen_reads
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.varlen_reads import ExtentReads, can_read_extents
from deployments.engine.model import runner
from tests.engine import fake_varlen
from tests.engine.fake_graphs import FakeCapturer
from tests.engine.layouts import for_each_captured_layout
from tests.engine.replay.test_cuda_replay import Decoding, MakeModel, answers, capturer, prompts
from tests.engine.tiny_models import MODELS, gemma2, gemma3_text, generate, load, make_engine, qwen2

pytestmark = pytest.mark.slow

__all__ = ["capturer"]  # a fixture

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = KVShape((None,), num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LOOKING = {"gpt2"}
SOFTCAPPED = {"gemma2"}


class FakeVarlen(fake_varlen.FakeVarlen):
    """Reads no token beyond a row's length, and keeps the starts of the latest call."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *others: Any,
        **options: Any,
    ) -> torch.Tensor:
        starts, lengths = others[1], options["seqused_k"]
        self.starts = starts[:-1]
        within = torch.arange(others[3], device=query.device)
        read = starts[:-1, None] + torch.minimum(within, lengths[:, None] - 1)
        is_read = torch.zeros(len(key), dtype=torch.bool, device=query.device)
        is_read = is_read.index_fill(0, read.flatten(), 1)[:, None, None]
        key, value = (tokens.where(is_read, 0) for tokens in (key, value))
        return super().__call__(query, key, value, *others, **options)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> FakeVarlen:
    """Let captured steps read their extents by length."""
    monkeypatch.setattr(runner, "can_read_extents", lambda *_, is_sorted: True)
    return FakeVarlen(monkeypatch)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the comparison on this machine, as if it were a GPU."""
    compare = varlen_reads._error

    def error(shape: KVShape, num_heads: int, _: torch.device, order: range) -> float:
        return compare(shape, num_heads, CPU, order)

    monkeypatch.setattr(varlen_reads, "_error", error)


@for_each_captured_layout
def test_steps_that_read_by_length_give_what_generate_gives(
    name: str, capturer: FakeCapturer, varlen: FakeVarlen
) -> None:
    make_model, asked = MODELS[name], prompts(5)
    engine = make_engine(load(make_model), max_num_seqs=3)
    engine.warm_up()
    given = answers(engine, asked, 12)
    assert given == {key: generate(make_model, prompt, 12) for key, prompt in asked.items()}
    assert (varlen.num_calls > 0) == (name not in SOFTCAPPED)


@pytest.mark.parametrize("make_model", [qwen2, gemma3_text])
@pytest.mark.parametrize("chosen", [(0,), (0, 2), (3, 1), (2, 3, 0, 1)])
def test_any_rows_give_the_logits_of_a_plain_step(
    chosen: tuple[int, ...], make_model: MakeModel, varlen: FakeVarlen
) -> None:
    decoding = Decoding(make_model, 4)
    expected = decoding.plain_logits(*chosen)
    for _ in range(2):
        torch.testing.assert_close(decoding.logits(*chosen), expected, rtol=1e-4, atol=1e-4)
    assert varlen.num_calls > 0


def test_extents_of_a_single_group_are_read_in_ascending_order(varlen: FakeVarlen) -> None:
    decoding = Decoding(qwen2, 4)
    starts = [start for (start,) in decoding.starts]
    assert starts != sorted(starts)
    decoding.logits(0, 1, 2)
    spare_token = decoding.kv.spare_tokens[0]
    assert varlen.starts.tolist() == [*sorted(starts[:3]), spare_token]


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


def test_lengths_are_cut_to_the_longest_read() -> None:
    reads = ExtentReads.of(torch.tensor([8, 64, 32]), torch.tensor([1, 9, 40]), 128, longest=16)
    assert reads.query_starts.tolist() == [0, 1, 2, 3]
    assert reads.starts.tolist() == [8, 64, 32, 128]
    assert reads.lengths.tolist() == [1, 9, 16]


@pytest.mark.usefixtures("varlen", "on_a_cpu")
@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_reads_that_agree_with_masked_attention_are_used(num_heads: int, is_sorted: bool) -> None:
    assert can_read_extents(SHAPE, num_heads, GPU, is_sorted=is_sorted)


@pytest.mark.usefixtures("on_a_cpu")
def test_reads_that_need_ascending_starts_are_used_only_for_those(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = FakeVarlen(monkeypatch)

    def sorting(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        starts = arguments[4]
        return right(*arguments[:4], starts.sort().values, *arguments[5:], **options)

    monkeypatch.setattr(varlen_reads, "flash_attention", sorting)
    assert can_read_extents(SHAPE, 4, GPU, is_sorted=True)
    assert not can_read_extents(SHAPE, 4, GPU, is_sorted=False)
    assert "flash attention is off by" in caplog.text


@pytest.mark.usefixtures("on_a_cpu")
def test_reads_beyond_a_rows_length_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_varlen.FakeVarlen(monkeypatch)  # multiplies such values by a weight of 0
    assert not can_read_extents(SHAPE, 4, GPU, is_sorted=True)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_reads_that_give_other_results_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float
) -> None:
    right = FakeVarlen(monkeypatch)

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        return right(*arguments, **options) * factor

    monkeypatch.setattr(varlen_reads, "flash_attention", wrong)
    assert not can_read_extents(SHAPE, 4, GPU, is_sorted=True)
    assert "flash attention is off by" in caplog.text


@pytest.mark.usefixtures("on_a_cpu")
def test_reads_that_fail_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not can_read_extents(
            SHAPE, 4, GPU, is_sorted=True
        )  # torch's own takes no lengths on a CPU
    assert "flash attention fails here" in caplog.text


@pytest.mark.usefixtures("varlen")
def test_a_cpu_and_unsupported_dtypes_are_not_tried() -> None:
    assert not can_read_extents(SHAPE, 4, CPU, is_sorted=True)
    float32 = KVShape((None,), num_kv_heads=2, head_dim=8, dtype=torch.float32)
    assert not can_read_extents(float32, 4, GPU, is_sorted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(14, 2, 64), (28, 4, 128)])
def test_a_gpu_reads_extents_by_length(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = KVShape((None,), num_kv_heads, head_dim, torch.bfloat16)
    assert can_read_extents(shape, num_heads, GPU, is_sorted=False)
