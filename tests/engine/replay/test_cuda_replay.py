"""Decode steps as graphs, with fakes in place of CUDA's graphs."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deployments.compute.sdpa import attend
from deployments.contract.sampling_params import SamplingParams
from deployments.engine import engine as engine_module
from deployments.engine.attention import attention
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.engine import Engine
from deployments.engine.model import runner
from deployments.engine.model.runner import ModelRunner
from deployments.engine.replay import static_decode
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest
from deployments.plan.kv_layout import KVCopy
from tests.engine.attention.extents import make_cache
from tests.engine.collector import GREEDY, run_staggered, sized_image_request
from tests.engine.fake_graphs import FakeCapturer, FakeGraph
from tests.engine.fake_varlen import FakeVarlen
from tests.engine.layouts import for_each_captured_layout
from tests.engine.tiny_models import (
    MODELS,
    gemma3_text,
    generate,
    gpt2,
    load,
    make_engine,
    mistral,
    qwen2,
    qwen2_5_vl,
)
from tests.failing import failing

pytestmark = pytest.mark.slow

MakeModel = Callable[[], PreTrainedModel]

LOOKING = {"gpt2"}
"""Families whose forward pass reads its input on the host, which no graph can."""


@pytest.fixture
def capturer(monkeypatch: pytest.MonkeyPatch) -> FakeCapturer:
    """Let engines capture their decode steps as fake graphs of torch's operators, as on a GPU.

    CPU kernels stay out of use: they get addresses, not tensors, so a fake graph can't see them.
    """
    monkeypatch.setattr(engine_module, "has_kernels", lambda device: False)
    made = FakeCapturer()
    monkeypatch.setattr(engine_module, "open_capturer", lambda device: made)
    return made


def before(method: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    """Return the method, preceded by a call of `call`."""

    def called(*arguments: Any) -> Any:
        call()
        return method(*arguments)

    return called


def prompts(count: int) -> dict[str, tuple[int, ...]]:
    return {
        f"s{i}": tuple(50 + (7 * i + 3 * j) % 200 for j in range(3 + 9 * i)) for i in range(count)
    }


def answers(engine: Engine, asked: dict[str, tuple[int, ...]], num: int) -> dict[str, list[int]]:
    for name, prompt in asked.items():
        engine.add(SequenceRequest(name, prompt, SamplingParams(temperature=0, max_tokens=num)))
    given: dict[str, list[int]] = {name: [] for name in asked}
    while engine.has_work:
        for name, delta in engine.step():
            assert delta.error is None
            given[name] += delta.token_ids
        engine.check()
    return given


@for_each_captured_layout
def test_replayed_steps_give_what_generate_gives(name: str, capturer: FakeCapturer) -> None:
    make_model, asked = MODELS[name], prompts(5)
    engine = make_engine(load(make_model), max_num_seqs=3)
    engine.warm_up()
    given = answers(engine, asked, 12)
    assert given == {key: generate(make_model, prompt, 12) for key, prompt in asked.items()}
    assert (capturer.num_replays > 10) == (name not in LOOKING)


@pytest.mark.parametrize("reads_by_length", [False, True])
def test_tokens_after_an_image_keep_their_shifted_positions_in_graphs(
    capturer: FakeCapturer, monkeypatch: pytest.MonkeyPatch, reads_by_length: bool
) -> None:
    if reads_by_length:
        monkeypatch.setattr(engine_module, "find_obstacle", lambda *_: None)
        FakeVarlen(monkeypatch, torch.float32)
    random = Random(3)
    requests = [sized_image_request(f"i{at}", random, n) for at, n in enumerate((1, 2, 1))]
    engine = make_engine(load(qwen2_5_vl), max_num_seqs=4)
    engine.warm_up()
    requests += [SequenceRequest(name, prompt, GREEDY) for name, prompt in prompts(2).items()]
    found = run_staggered(engine, requests)
    for request in requests:
        expected = generate(qwen2_5_vl, request.prompt_token_ids, 12, request.model_inputs)
        assert found.token_ids(request.sequence_id) == expected
    assert capturer.num_replays > 5


def test_a_model_that_can_not_be_captured_is_tried_once(
    capturer: FakeCapturer, caplog: pytest.LogCaptureFixture
) -> None:
    answers(make_engine(load(gpt2), max_num_seqs=3), prompts(4), 8)
    assert capturer.num_warm_ups == 1
    assert caplog.text.count("could not be captured") == 1


def test_a_step_whose_capture_fails_has_still_run(capturer: FakeCapturer) -> None:
    capturer.error = torch.OutOfMemoryError("no room for a pool")
    asked = prompts(2)
    given = answers(make_engine(load(qwen2)), asked, 6)
    assert given == {key: generate(qwen2, prompt, 6) for key, prompt in asked.items()}
    assert not capturer.graphs


class Decoding:
    """Prefilled sequences of a runner that captures."""

    def __init__(
        self,
        make_model: MakeModel,
        num_seqs: int,
        *,
        reads_by_length: bool = False,
        max_batched_tokens: int = 512,
    ) -> None:
        loaded = load(make_model)
        self.capturer = FakeCapturer()
        shape = KVShape.of(loaded.text_config, torch.float32)
        self.kv, self.starts = make_cache(
            shape, [300] * 4, max_model_len=600, block_size=16, reads_by_length=reads_by_length
        )
        self.runner = ModelRunner(
            loaded.model,
            self.kv,
            4,
            max_batched_tokens=max_batched_tokens,
            has_kernels=False,
            capturer=self.capturer,
        )
        self.plain = ModelRunner(
            loaded.model, self.kv, 4, max_batched_tokens=max_batched_tokens, has_kernels=False
        )
        self.sequences = [self._prefill(i) for i in range(num_seqs)]

    def _prefill(self, number: int, num_tokens: int = 5) -> Sequence:
        prompt = tuple(50 + (11 * number + 3 * j) % 200 for j in range(num_tokens + number))
        request = SequenceRequest(f"s{number}", prompt, SamplingParams())
        sequence = Sequence(request, max_model_len=600, eos_token_ids=frozenset())
        chunk = PrefillChunk(sequence, self.starts[number], 0, len(prompt))
        self.plain.run(StepPlan((), (chunk,)))
        sequence.num_computed_tokens = len(prompt)
        sequence.append(90 + number)
        return sequence

    def logits(self, *chosen: int, runner: ModelRunner | None = None) -> torch.Tensor:
        rows = tuple(DecodeRow(self.sequences[i], self.starts[i]) for i in chosen)
        result = (runner or self.runner).run(StepPlan(rows, ()))
        assert result is not None
        assert [seq.sequence_id for seq in result.sequences] == [f"s{i}" for i in chosen]
        assert result.logits.dtype == torch.float32
        return result.logits

    def plain_logits(self, *chosen: int) -> torch.Tensor:
        return self.logits(*chosen, runner=self.plain)


@pytest.mark.parametrize("make_model", [qwen2, mistral, gemma3_text])
@pytest.mark.parametrize("chosen", [(0,), (2,), (0, 2), (3, 1), (2, 3, 0), (1, 3, 0, 2)])
def test_any_rows_give_the_logits_of_a_plain_step(
    chosen: tuple[int, ...], make_model: MakeModel
) -> None:
    decoding = Decoding(make_model, 4)
    expected = decoding.plain_logits(*chosen)
    for _ in range(3):
        torch.testing.assert_close(decoding.logits(*chosen), expected, rtol=1e-4, atol=1e-4)
    assert decoding.capturer.num_replays == 2


def test_one_graph_serves_rows_in_any_order_and_extents_that_have_moved() -> None:
    decoding = Decoding(gemma3_text, 3)
    decoding.logits(0, 1)
    expected = decoding.plain_logits(2, 1, 0)
    torch.testing.assert_close(decoding.logits(2, 1, 0), expected, rtol=1e-4, atol=1e-4)
    source, target = decoding.starts[0], decoding.starts[3]
    decoding.kv.apply(KVCopy(group, source[group], target[group], 5) for group in range(2))
    decoding.starts[0] = target
    torch.testing.assert_close(decoding.logits(0, 2, 1), expected[[2, 0, 1]], rtol=1e-4, atol=1e-4)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [0, 1]


def test_sequences_that_do_not_decode_keep_what_they_hold() -> None:
    decoding = Decoding(mistral, 4)
    kept = [slice(start, start + 304) for (start,) in (decoding.starts[1], decoding.starts[2])]

    def stored() -> list[torch.Tensor]:
        tensors = (*decoding.kv.keys, *decoding.kv.values)
        return [tensor[part].clone() for tensor in tensors for part in kept]

    decoding.logits(0, 3)
    before = stored()
    decoding.logits(0, 3)
    for old, new in zip(before, stored(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_a_sequence_with_nan_affects_no_other() -> None:
    decoding = Decoding(qwen2, 3)
    expected = decoding.plain_logits(0, 1, 2)
    (start,) = decoding.starts[1]
    for tensor in (*decoding.kv.keys, *decoding.kv.values):
        tensor[start] = torch.nan
    for _ in range(2):
        found = decoding.logits(0, 1, 2)
        assert found[1].isnan().all()
        torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-4)


def test_rows_that_would_gather_too_much_at_once_attend_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding = Decoding(qwen2, 4)
    expected = decoding.plain_logits(0, 1, 2, 3)
    row_bytes = 256 * decoding.kv.shape.bytes_per_layer_token
    monkeypatch.setattr(static_decode, "MAX_GATHERED_BYTES", 3 * row_bytes)
    num_calls = 0

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return attend(*arguments, **options)

    monkeypatch.setattr(attention, "attend", counted)
    torch.testing.assert_close(decoding.logits(0, 1, 2, 3), expected, rtol=1e-4, atol=1e-4)
    num_layers = len(decoding.kv.keys)
    assert num_calls == 2 * 2 * num_layers  # the warm-up and the capture, two parts each


def test_after_a_capture_without_memory_earlier_graphs_stay_and_other_sizes_run_plainly() -> None:
    decoding = Decoding(qwen2, 4)
    decoding.logits(0)
    decoding.capturer.error = torch.OutOfMemoryError("no room for a second one")
    decoding.logits(0, 1)
    decoding.capturer.error = None
    decoding.logits(0)
    assert decoding.capturer.num_replays == 1
    expected = decoding.plain_logits(0, 1, 2)
    torch.testing.assert_close(decoding.logits(0, 1, 2), expected, rtol=1e-4, atol=1e-4)
    assert (decoding.runner.num_captured, decoding.capturer.num_warm_ups) == (1, 2)
    decoding.runner.drop_captured()  # frees memory
    for _ in range(2):
        decoding.logits(0, 1, 2)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [1, 1]


def test_a_memory_shortage_in_any_part_of_a_captured_step_is_a_pause_and_no_error(
    capturer: FakeCapturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the first step of a size, in its capture, and in a replay, in turn."""
    num_calls = 0

    def sometimes() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(FakeCapturer, "warm_up", before(FakeCapturer.warm_up, sometimes))
    monkeypatch.setattr(FakeCapturer, "capture", before(FakeCapturer.capture, sometimes))
    monkeypatch.setattr(FakeGraph, "replay", before(FakeGraph.replay, sometimes))
    asked = prompts(6)
    given = answers(make_engine(load(qwen2), max_num_seqs=4), asked, 12)
    assert given == {key: generate(qwen2, prompt, 12) for key, prompt in asked.items()}
    assert num_calls > 9


def test_dropped_steps_are_captured_again() -> None:
    decoding = Decoding(qwen2, 1)
    expected = decoding.plain_logits(0)
    decoding.logits(0)
    decoding.runner.drop_captured()
    assert decoding.runner.num_captured == 0
    for _ in range(2):
        torch.testing.assert_close(decoding.logits(0), expected, rtol=1e-4, atol=1e-4)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [0, 1]


def test_later_steps_do_not_change_logits() -> None:
    decoding = Decoding(qwen2, 2)
    decoding.logits(0)
    first = decoding.logits(0)
    kept = first.clone()
    decoding.sequences[0].token_ids[-1] = 77
    assert not torch.equal(decoding.logits(0), kept)
    decoding.logits(0, 1)
    decoding.logits(0, 1)
    assert torch.equal(first, kept)


def test_a_longer_sequence_needs_a_graph_of_its_own() -> None:
    decoding = Decoding(qwen2, 1)
    decoding.logits(0)
    decoding.sequences[0] = decoding._prefill(0, num_tokens=256)
    expected = decoding.plain_logits(0)
    for _ in range(2):
        torch.testing.assert_close(decoding.logits(0), expected, rtol=1e-4, atol=1e-4)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [0, 1]


def test_the_least_recently_used_graph_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_GRAPHS", 2)
    decoding = Decoding(qwen2, 4)
    for chosen in (
        (0,),
        (0, 1),
        (0,),
        (0, 1, 2, 3),
    ):  # the third makes the graph of two rows the oldest
        decoding.logits(*chosen)
    assert decoding.runner.num_captured == 2
    decoding.logits(0)
    assert [graph.num_replays for graph in decoding.capturer.graphs] == [2, 0, 0]
    decoding.logits(0, 1)
    assert len(decoding.capturer.graphs) == 4


def test_a_graph_whose_replay_raises_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(qwen2, 1)
    expected = decoding.logits(0)

    monkeypatch.setattr(
        decoding.capturer.graphs[0], "replay", failing(RuntimeError("launch failed"))
    )
    with pytest.raises(RuntimeError, match="launch failed"):
        decoding.logits(0)
    torch.testing.assert_close(decoding.logits(0), expected)
    assert len(decoding.capturer.graphs) == 2


def test_a_failure_of_the_model_raises_and_ends_no_captures() -> None:
    decoding = Decoding(qwen2, 2)
    decoding.sequences[1].token_ids[-1] = 10**6  # no such token: the embedding raises
    with pytest.raises(IndexError):
        decoding.logits(0, 1)
    decoding.logits(0)
    decoding.logits(0)
    assert decoding.capturer.num_replays == 1
