import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedConfig

from deployments.contract.sampling_params import SamplingParams
from deployments.engine import engine as engine_module
from deployments.engine.attention import varlen_reads
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.attention.varlen_reads import (
    TOLERANCE,
    ExtentReads,
    compare_rows_with_masks,
    compare_with_masks,
    describe_reads,
    find_obstacle,
    find_row_attention,
)
from deployments.engine.model.runner import ModelRunner
from deployments.engine.replay import cuda_mixed, cuda_replay
from deployments.engine.replay.cuda_mixed import MixedSteps
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest
from tests.engine.fake_graphs import FakeCapturer, FakeGraph
from tests.engine.fake_varlen import FakeVarlen
from tests.engine.layouts import for_each_captured_layout
from tests.engine.replay.test_cuda_replay import Decoding, MakeModel, answers, capturer, prompts
from tests.engine.tiny_models import (
    MODELS,
    gemma2,
    gemma3_text,
    generate,
    gpt_oss,
    load,
    make_engine,
    qwen2,
)
from tests.failing import failing

pytestmark = pytest.mark.slow

__all__ = ["capturer"]  # a fixture

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = KVShape((None, 100), num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
MASKED = {"gemma2": "softcapped scores", "gpt_oss": "attention sinks"}
CONFIG = cast("PreTrainedConfig", SimpleNamespace(num_attention_heads=4))


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> FakeVarlen:
    """Let steps read their extents by length."""

    def found(shape: KVShape, text_config: PreTrainedConfig, device: torch.device) -> str | None:
        return MASKED.get(text_config.model_type)

    monkeypatch.setattr(engine_module, "find_obstacle", found)
    return FakeVarlen(monkeypatch, torch.float32)


@for_each_captured_layout
def test_steps_that_read_by_length_give_what_generate_gives(
    name: str, capturer: FakeCapturer, varlen: FakeVarlen
) -> None:
    make_model, asked = MODELS[name], prompts(5)
    engine = make_engine(load(make_model), max_num_seqs=3)
    engine.warm_up()
    given = answers(engine, asked, 12)
    assert given == {key: generate(make_model, prompt, 12) for key, prompt in asked.items()}
    assert (varlen.num_calls > 0) == (name not in MASKED)


@pytest.mark.parametrize("make_model", [qwen2, gemma3_text])
@pytest.mark.parametrize("budget", [7, 64, 100])
def test_steps_with_chunks_are_replayed_and_give_what_generate_gives(
    make_model: MakeModel, budget: int, capturer: FakeCapturer, varlen: FakeVarlen
) -> None:
    asked = prompts(6)
    engine = make_engine(load(make_model), max_num_seqs=4, budget=budget)
    engine.warm_up()
    num_decode_graphs = 3
    given = answers(engine, asked, 12)
    assert given == {key: generate(make_model, prompt, 12) for key, prompt in asked.items()}
    num_replays = sum(graph.num_replays for graph in capturer.graphs[num_decode_graphs:])
    assert num_replays > 0 or (make_model is gemma3_text and budget > 7)  # it leaves its window


def test_a_failed_capture_of_a_mixed_step_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen, caplog: pytest.LogCaptureFixture
) -> None:
    decoding = Decoding(qwen2, 2, reads_by_length=True)

    def fail(*arguments: Any) -> torch.Tensor:
        if len(decoding.capturer.graphs) == 3:
            decoding.capturer.error = RuntimeError("operation not permitted")
        return logits(*arguments)

    logits = decoding.runner._graphs._run_model  # type: ignore[union-attr] # it captures
    monkeypatch.setattr(decoding.runner._graphs, "_run_model", fail)
    decoding.runner.trace()
    assert decoding.runner.num_captured == 3
    assert "no more sizes of steps are captured than these 3" in caplog.text
    decoding.logits(0, 1)
    assert decoding.capturer.num_replays == 1


def mixed_logits(decoding: Decoding, runner: ModelRunner) -> torch.Tensor:
    """Run a decode row and a prompt of 5 tokens."""
    request = SequenceRequest("new", (60, 61, 62, 63, 64), SamplingParams())
    new = Sequence(request, max_model_len=600, eos_token_ids=frozenset())
    row = DecodeRow(decoding.sequences[0], decoding.starts[0])
    result = runner.run(StepPlan((row,), (PrefillChunk(new, decoding.starts[1], 0, 5),)))
    assert result is not None
    return result.logits


def test_dropped_steps_with_chunks_are_captured_again(varlen: FakeVarlen) -> None:
    decoding = Decoding(qwen2, 1, reads_by_length=True, max_batched_tokens=64)
    expected = mixed_logits(decoding, decoding.plain)
    decoding.runner.trace()
    decoding.runner.drop_captured()
    for _ in range(2):
        found = mixed_logits(decoding, decoding.runner)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert decoding.runner.num_captured == 1
    assert decoding.capturer.graphs[-1].num_replays == 1


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no such kernel")]
)
def test_a_step_that_fails_at_the_start_leaves_an_engine_that_answers(
    error: Exception, num_before: int, monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen
) -> None:
    decoding = Decoding(qwen2, 2, reads_by_length=True)
    expected = decoding.plain_logits(0, 1)
    warm_up = decoding.capturer.warm_up

    def fail(run: Callable[[], torch.Tensor]) -> torch.Tensor:
        if len(decoding.capturer.graphs) == num_before:
            raise error
        return warm_up(run)

    monkeypatch.setattr(decoding.capturer, "warm_up", fail)
    decoding.runner.trace()
    is_short = isinstance(error, torch.OutOfMemoryError)
    assert decoding.runner.num_captured == (num_before if is_short else 0)
    torch.testing.assert_close(decoding.logits(0, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_lost_device_stops_the_start(monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen) -> None:
    decoding = Decoding(qwen2, 1, reads_by_length=True)
    monkeypatch.setattr(cuda_replay, "is_fatal", lambda error: True)
    monkeypatch.setattr(decoding.capturer, "warm_up", failing(RuntimeError("illegal access")))
    with pytest.raises(RuntimeError, match="illegal access"):
        decoding.runner.trace()


def test_steps_with_chunks_have_no_size_beyond_the_most_tokens_of_a_step(
    varlen: FakeVarlen,
) -> None:
    kv = Decoding(qwen2, 0, reads_by_length=True).kv

    def sizes(max_batched_tokens: int) -> list[int]:
        return [size.num_tokens for size in MixedSteps(kv, 4, max_batched_tokens).sizes]

    assert sizes(64) == [64]
    assert sizes(100) == [128, 64]
    assert sizes(8192) == sizes(1024) == [1024, 768, 512, 384, 256, 192, 128, 64]


def test_a_long_decode_row_attends_in_a_call_of_its_own(
    monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen
) -> None:
    decoding = Decoding(qwen2, 0, reads_by_length=True)
    monkeypatch.setattr(cuda_mixed, "MAX_DECODE_READ", 20)
    mixed, (first, second, *_) = MixedSteps(decoding.kv, 4, 64), decoding.starts

    def covered(position: int) -> bool:
        chunks = (ChunkRows(1, second, 0, 5),)
        return mixed.cover(PackedStep(decoding.kv, (first,), (position,), chunks), 2) is not None

    assert covered(19)
    assert not covered(20)


@pytest.mark.parametrize("make_model", [qwen2, gemma3_text])
@pytest.mark.parametrize("chosen", [(0,), (0, 2), (3, 1), (2, 3, 0, 1)])
def test_any_rows_give_the_logits_of_a_plain_step(
    chosen: tuple[int, ...], make_model: MakeModel, varlen: FakeVarlen
) -> None:
    decoding = Decoding(make_model, 4, reads_by_length=True)
    expected = Decoding(make_model, 4).plain_logits(*chosen)
    num_calls = varlen.num_calls
    for _ in range(2):
        torch.testing.assert_close(decoding.logits(*chosen), expected, rtol=1e-4, atol=1e-4)
    assert varlen.num_calls > num_calls


def test_steps_are_captured_at_the_start_one_for_each_number_of_rows(varlen: FakeVarlen) -> None:
    decoding = Decoding(qwen2, 3, reads_by_length=True)
    expected = decoding.plain_logits(0, 1, 2)
    before = [tensor.clone() for tensor in (*decoding.kv.keys, *decoding.kv.values)]
    decoding.runner.trace()
    for tensor, old in zip((*decoding.kv.keys, *decoding.kv.values), before, strict=True):
        torch.testing.assert_close(tensor[:-1], old[:-1], rtol=0, atol=0, equal_nan=True)
    # 4, 2 and 1 decode rows, and 512, 384, ... tokens with prompts among them.
    assert (decoding.runner.num_captured, decoding.capturer.num_warm_ups) == (9, 9)
    assert decoding.runner.captured is not None
    assert decoding.runner.captured.startswith("9 CUDA graphs, captured in ")
    assert decoding.runner.captured.endswith(" s, 9 MiB")
    torch.testing.assert_close(decoding.logits(0, 1, 2), expected, rtol=1e-4, atol=1e-4)
    decoding.sequences[0] = decoding._prefill(0, num_tokens=256)  # any length
    decoding.logits(0)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [1, 0, 1, *[0] * 6]
    assert decoding.capturer.num_warm_ups == 9


def test_graphs_that_are_given_up_at_the_start_take_no_memory_in_its_report(
    monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen
) -> None:
    decoding = Decoding(qwen2, 3, reads_by_length=True)
    capture = decoding.capturer.capture

    def capture_two(run: Callable[[], torch.Tensor]) -> FakeGraph:
        if len(decoding.capturer.graphs) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(run)

    monkeypatch.setattr(decoding.capturer, "capture", capture_two)
    decoding.runner.trace()
    assert decoding.runner.captured is not None
    assert decoding.runner.captured.startswith("0 of 9 CUDA graphs, captured in ")
    assert decoding.runner.captured_bytes == 0


@pytest.mark.parametrize("make_model", [qwen2, gemma3_text])
def test_graphs_are_launched_in_parts_with_some_layers(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen
) -> None:
    monkeypatch.setattr(cuda_replay, "PART_LAYERS", {1, 99})
    decoding = Decoding(make_model, 3, reads_by_length=True)
    decoding.runner.trace()
    assert {graph.num_parts for graph in decoding.capturer.graphs} == {2}


def test_without_time_for_all_captures_a_step_takes_the_next_larger_graph(
    monkeypatch: pytest.MonkeyPatch, varlen: FakeVarlen, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_replay, "MAX_CAPTURE_S", -1.0)
    decoding = Decoding(qwen2, 3, reads_by_length=True)
    decoding.runner.trace()
    assert decoding.runner.captured is not None
    assert decoding.runner.captured.startswith("0 of 9 CUDA graphs")
    assert "no time to capture DecodeBucket(num_rows=4" in caplog.text
    expected = decoding.plain_logits(0)
    torch.testing.assert_close(decoding.logits(0), expected, rtol=1e-4, atol=1e-4)
    assert decoding.runner.num_captured == 0
    decoding.runner.drop_captured()  # captured again when they occur
    decoding.logits(0, 1, 2)
    decoding.capturer.error = torch.OutOfMemoryError("no room for a second one")
    decoding.logits(0)
    torch.testing.assert_close(decoding.logits(0), expected, rtol=1e-4, atol=1e-4)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [1]


@pytest.mark.parametrize("make_model", [gemma2, gpt_oss])
def test_scores_that_are_not_plain_are_still_read_with_a_mask(
    varlen: FakeVarlen, make_model: MakeModel
) -> None:
    Decoding(make_model, 1, reads_by_length=True).logits(0)
    assert varlen.num_calls == 0


def test_lengths_are_cut_to_the_longest_read() -> None:
    reads = ExtentReads.of_rows(
        torch.tensor([8, 64, 32]), torch.tensor([1, 9, 40]), 128, longest=16
    )
    assert reads.query_starts.tolist() == [0, 1, 2, 3]
    assert reads.starts.tolist() == [8, 64, 32, 128]
    assert reads.lengths.tolist() == [1, 9, 16]


@pytest.mark.parametrize("num_heads", [2, 6])
def test_reads_that_agree_with_masked_attention_are_used(
    monkeypatch: pytest.MonkeyPatch, num_heads: int
) -> None:
    varlen = FakeVarlen(monkeypatch)
    assert compare_with_masks(SHAPE, num_heads, CPU) is None
    assert varlen.num_calls == 6


def sorting(arguments: list[Any], options: dict[str, Any]) -> None:
    arguments[4] = arguments[4].sort().values


def top_left(arguments: list[Any], options: dict[str, Any]) -> None:
    options["seqused_k"] = options["seqused_k"].clamp(max=arguments[5])


def without_causality(arguments: list[Any], options: dict[str, Any]) -> None:
    options["is_causal"] = False


def without_a_window(arguments: list[Any], options: dict[str, Any]) -> None:
    options["window_size_left"] = None


def one_too_long(arguments: list[Any], options: dict[str, Any]) -> None:
    options["seqused_k"] = options["seqused_k"] + 1


def one_query_too_few(arguments: list[Any], options: dict[str, Any]) -> None:
    arguments[5] = max(1, arguments[5] - 1)


@pytest.mark.parametrize(
    "mutate",
    [sorting, top_left, without_causality, without_a_window, one_too_long, one_query_too_few],
)
def test_reads_that_give_other_results_are_not_used(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[list[Any], dict[str, Any]], None]
) -> None:
    right = FakeVarlen(monkeypatch)

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        changed = list(arguments)
        mutate(changed, options)
        return right(*changed, **options)

    monkeypatch.setattr(varlen_reads, "flash_attention", wrong)
    obstacle = compare_with_masks(SHAPE, 4, CPU)
    assert obstacle is not None
    assert "off by" in obstacle


def test_reads_that_fail_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        obstacle = compare_with_masks(SHAPE, 4, CPU)  # torch's own does not run on a CPU
    assert obstacle is not None
    assert obstacle.startswith("an error of flash attention")
    assert "flash attention fails here" in caplog.text


def test_a_comparison_without_memory_says_nothing_of_the_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = failing(torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(varlen_reads, "flash_attention", short)
    with pytest.raises(torch.OutOfMemoryError):
        compare_with_masks(SHAPE, 4, CPU)
    monkeypatch.setattr(varlen_reads, "import_row_attention", short)
    with pytest.raises(torch.OutOfMemoryError):
        find_row_attention(SHAPE, 4, GPU)


class Rows:
    """Attention of decode rows by another operator; counts its calls."""

    def __init__(self, varlen: FakeVarlen) -> None:
        self._varlen = varlen
        self.num_calls = 0

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        scale: float | None,
    ) -> torch.Tensor:
        self.num_calls += 1
        ends = torch.arange(len(query) + 1, dtype=torch.int32)
        begun = torch.cat([starts[: len(query)], starts[:1]])
        return self._varlen(
            query,
            keys,
            values,
            ends,
            begun,
            1,
            longest,
            is_causal=False,
            scale=scale,
            window_size_left=None,
            seqused_k=lengths,
        )


def test_rows_that_attend_as_with_masks_are_found_right(varlen: FakeVarlen) -> None:
    assert compare_rows_with_masks(Rows(varlen), SHAPE, 4, CPU) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "mutate",
    [
        lambda starts, lengths: (starts, (lengths - 1).clamp(min=1)),
        lambda starts, lengths: (starts, lengths + 1),  # it reads what is NaN
        lambda starts, lengths: (starts.flip(0), lengths),
        lambda starts, lengths: (starts, torch.where(torch.arange(len(lengths)) < 9, lengths, 1)),
    ],
    ids=["a token less", "a token more", "others' extents", "wrong with many rows alone"],
)
def test_rows_that_attend_otherwise_are_found(
    mutate: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    varlen: FakeVarlen,
) -> None:
    def wrong(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        keys, values, starts, lengths, longest, scale = arguments
        changed = mutate(starts, lengths)
        return Rows(varlen)(query, keys, values, *changed, longest + 1, scale)

    error = compare_rows_with_masks(wrong, SHAPE, 4, CPU)
    assert not error <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (failing(ImportError("No module named 'triton'")), "No module named 'triton'"),
        (lambda: lambda query, *_: query, "our kernel is off by"),
    ],
)
def test_flash_attention_reads_rows_that_our_kernel_can_not(
    found: Callable[[], Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compare = varlen_reads.compare_rows_with_masks
    monkeypatch.setattr(varlen_reads, "import_row_attention", found)
    monkeypatch.setattr(
        varlen_reads,
        "compare_rows_with_masks",
        lambda attend_rows, shape, num_heads, _: compare(attend_rows, shape, num_heads, CPU),
    )
    assert find_row_attention(SHAPE, 4, GPU) is None
    assert "flash attention reads decode rows" in caplog.text
    assert said in caplog.text


def test_rows_have_our_attention_in_captured_steps_alone(
    monkeypatch: pytest.MonkeyPatch, capturer: FakeCapturer, varlen: FakeVarlen
) -> None:
    rows, asked = Rows(varlen), prompts(5)
    monkeypatch.setattr(engine_module, "find_row_attention", lambda *_: rows)
    engine = make_engine(load(qwen2), max_num_seqs=3)
    assert engine.attention == "flash attention by length, and our kernel for decode rows"
    engine.warm_up()
    num_calls = rows.num_calls
    assert num_calls > 0
    given = answers(engine, asked, 12)
    assert given == {key: generate(qwen2, prompt, 12) for key, prompt in asked.items()}
    assert capturer.num_replays > 10
    monkeypatch.setattr(engine_module, "open_capturer", lambda device: None)
    plain, num_calls = make_engine(load(qwen2), max_num_seqs=3), rows.num_calls
    assert answers(plain, asked, 12) == given
    assert rows.num_calls == num_calls


@pytest.mark.parametrize(
    ("shape", "config", "device", "expected"),
    [
        (SHAPE, CONFIG, CPU, "a device of type cpu"),
        (replace(SHAPE, dtype=torch.float32), CONFIG, GPU, "float32"),
        (replace(SHAPE, head_dim=12), CONFIG, GPU, "heads of 12 elements"),
        (replace(SHAPE, head_dim=512), CONFIG, GPU, "heads of 512 elements"),
        (SHAPE, SimpleNamespace(attn_logit_softcapping=50.0), GPU, "softcapped scores"),
        (SHAPE, SimpleNamespace(model_type="gpt_oss"), GPU, "attention sinks"),
    ],
)
def test_what_flash_attention_does_not_take_is_named(
    shape: KVShape, config: PreTrainedConfig, device: torch.device, expected: str
) -> None:
    assert find_obstacle(shape, config, device) == expected
    assert expected in describe_reads(expected, attends_in_place=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(14, 2, 64), (28, 4, 128), (16, 8, 256), (12, 12, 64), (4, 1, 8)],
)
def test_a_gpu_reads_extents_by_length(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = KVShape((None, 100), num_kv_heads, head_dim, torch.bfloat16)
    assert compare_with_masks(shape, num_heads, GPU) is None
