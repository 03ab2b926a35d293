"""Tests that all tensors of a step are on the model's device, with `meta` in place of a GPU.

On `meta`, as on a GPU, operators refuse to mix tensors of the host and of the device. There are no
values, so what a step reads back to the host is made up.
"""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.shapes import TINY, TINY_GEMMA3, Shape
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.attention.attention import ATTENTION_NAME, register_attention
from deployments.engine.attention.decode_spans import CALL_COST_BYTES
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.model.runner import ModelRunner
from deployments.engine.replay.cuda_replay import CudaDecodeReplay
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import sample
from deployments.engine.scheduling.scheduler import DecodeRow, PrefillChunk, StepPlan
from deployments.engine.scheduling.sequence import Sequence, SequenceRequest
from deployments.engine.scheduling.token_counts import TokenCounts
from deployments.plan.kv_layout import BLOCK_SIZE, KVLayout
from tests.engine.fake_graphs import FakeCapturer
from tests.engine.fake_varlen import FakeVarlen

META = torch.device("meta")
VOCAB_SIZE = 2000
LOOK = torch.Tensor.tolist


@pytest.fixture(autouse=True)
def meta_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `tolist` of tensors without values return ones."""

    def look(tensor: torch.Tensor) -> Any:
        return LOOK(torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", look)
    monkeypatch.setitem(CALL_COST_BYTES, "meta", 0)  # so that each row is a span of its own


def sequence(name: str, num_tokens: int) -> Sequence:
    request = SequenceRequest(name, tuple(range(5, 5 + num_tokens)), SamplingParams())
    return Sequence(request, max_model_len=400, eos_token_ids=frozenset())


class Placed:
    """A model and its KV cache on `meta`, with two sequences that decode."""

    def __init__(self, model: PreTrainedModel, *, reads_by_length: bool) -> None:
        register_attention()
        model.train(mode=False).set_attn_implementation(ATTENTION_NAME)
        torch.nn.Module.to(model, META, torch.bfloat16)
        shape = KVShape.of(model.config, torch.bfloat16)
        capacities = shape.group_capacities(400)
        layout = KVLayout(capacities, (8,) * len(capacities))
        self.kv = KVCache(
            shape, layout, max_model_len=400, device=META, reads_by_length=reads_by_length
        )
        self.runner = ModelRunner(model, self.kv, 4, max_batched_tokens=64, has_kernels=False)
        self.rows = []
        for block, num_tokens in ((0, 9), (3, 300)):
            decoding = sequence(str(block), num_tokens)
            decoding.num_computed_tokens = num_tokens - 1
            self.rows.append(DecodeRow(decoding, self.starts(block)))

    def starts(self, block: int) -> tuple[int, ...]:
        return (block * BLOCK_SIZE,) * self.kv.num_groups


@pytest.fixture(params=[False, True], ids=["masks", "by length"])
def reads_by_length(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> FakeVarlen:
    return FakeVarlen(monkeypatch, device="meta")


@pytest.fixture(params=[TINY, TINY_GEMMA3], ids=["qwen2", "gemma3"])
def placed(request: pytest.FixtureRequest, varlen: FakeVarlen, reads_by_length: bool) -> Placed:
    shape: Shape = request.param
    model = shape.model(shape.config(**shape.options))
    return Placed(model, reads_by_length=reads_by_length)


def test_a_step_of_prefill_and_decode_stays_on_the_device(
    placed: Placed, varlen: FakeVarlen, reads_by_length: bool
) -> None:
    first, later = sequence("first", 20), sequence("later", 90)
    for chunks in (
        (
            PrefillChunk(first, placed.starts(2), 0, 20),
            PrefillChunk(later, placed.starts(5), 0, 50),
        ),
        (PrefillChunk(later, placed.starts(5), 50, 90),),
    ):
        done = placed.runner.run(StepPlan(tuple(placed.rows), chunks))
        assert done is not None
        assert (done.logits.device, done.logits.dtype) == (META, torch.float32)
        assert done.logits.shape == (3, 512)
    # One call for the decode rows and one for the chunks of each layer, in both steps.
    assert varlen.num_calls == (4 * len(placed.kv.keys) if reads_by_length else 0)


def test_a_captured_step_stays_on_the_device(
    placed: Placed, varlen: FakeVarlen, reads_by_length: bool
) -> None:
    capturer = FakeCapturer()
    replay = CudaDecodeReplay(
        placed.runner._compute,
        placed.kv,
        capturer,
        max_num_seqs=4,
        max_batched_tokens=64,
        max_graphs=4,
    )
    tokens = [row.sequence.token_ids[-1] for row in placed.rows]
    step = placed.runner._pack(StepPlan(tuple(placed.rows), ()))
    for _ in range(2):
        logits = replay.run(tokens, step)
        assert logits is not None
        assert (logits.device, logits.dtype, logits.shape) == (META, torch.float32, (2, 512))
    assert capturer.num_replays == 1
    assert (varlen.num_calls > 0) == reads_by_length


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1, seed=3),
        SamplingParams(temperature=1, seed=3, min_p=0.1),
        SamplingParams(temperature=1, seed=3, top_k=5),
        SamplingParams(temperature=1, seed=3, top_k=1000),
        SamplingParams(temperature=1, seed=3, top_p=0.5),
        SamplingParams(temperature=0, top_logprobs=20),
        SamplingParams(temperature=0, logit_bias=((7, 2.0), (9, -1.0))),
        SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=0.5),
    ],
)
def test_sampling_stays_on_the_device(params: SamplingParams) -> None:
    held = DeviceCounts(META)
    token_counts = TokenCounts((5, 6, 7), (8, 8)) if params.has_penalties else None
    rows = [
        SamplingRow(params, 5, token_counts),
        SamplingRow(SamplingParams(temperature=0), 5),
        SamplingRow(params, 9, token_counts, barred_token_ids=(3,)),
        SamplingRow(params, 6, bitmask=torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)),
    ]
    logits = torch.empty(len(rows), VOCAB_SIZE, device=META)
    for _ in range(2):
        assert all(sampled is not None for sampled in sample(logits, rows, held))
