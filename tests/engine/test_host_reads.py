"""How often a step reads a tensor on the host: each read waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deployments.contract.sampling_params import SamplingParams
from deployments.engine import engine as engine_module
from deployments.engine.sampling import sampler, truncation
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.truncation import read_nuclei
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.fake_graphs import FakeCapturer
from tests.engine.tiny_models import load, make_engine, qwen2

HOST_READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__")


class HostReads:
    """Counts reads of tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        for name in HOST_READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.num += 1
            return read(*arguments)

        return counted


GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=20)
QWEN_DEFAULTS = SamplingParams(
    temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, seed=3, max_tokens=20
)
"""What Qwen2.5-Instruct's generation_config.json sets."""
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.8,
    min_p=0.01,
    repetition_penalty=1.05,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias=((5, 1.0),),
    top_logprobs=5,
    min_tokens=19,
    seed=3,
    max_tokens=20,
)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("params", "num_reads"),
    [
        ((GREEDY,), 1),
        ((GREEDY, GREEDY, GREEDY), 1),
        ((SAMPLED, GREEDY), 1),
        ((SamplingParams(temperature=1, seed=3, top_k=5, top_p=0.5, max_tokens=20),), 1),
        ((SamplingParams(temperature=1, seed=3, top_p=0.5, max_tokens=20),), 1),
        ((SamplingParams(temperature=1, seed=3, top_p=0.5, max_tokens=20),) * 5, 1),
        ((SamplingParams(temperature=0, top_logprobs=2, max_tokens=20),), 1),
        ((SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=20),), 1),
        ((QWEN_DEFAULTS,), 1),
        ((QWEN_DEFAULTS, SAMPLED, EVERYTHING), 1),
    ],
)
def test_a_decode_step_reads_from_the_device_as_rarely_as_possible(
    monkeypatch: pytest.MonkeyPatch,
    params: tuple[SamplingParams, ...],
    num_reads: int,
    is_captured: bool,
) -> None:
    if is_captured:
        monkeypatch.setattr(engine_module, "open_capturer", lambda device: FakeCapturer())
    assert reads_of_a_step(monkeypatch, params) == num_reads


def reads_of_a_step(monkeypatch: pytest.MonkeyPatch, params: tuple[SamplingParams, ...]) -> int:
    """Return the reads of a decode step of such sequences, with the CPU in place of a GPU."""
    monkeypatch.setattr(sampler, "waits_for_reads", lambda device: True)
    monkeypatch.setattr(DeviceCounts, "open", DeviceCounts)
    engine = make_engine(load(qwen2), max_num_seqs=5)
    for i, each in enumerate(params):
        engine.add(SequenceRequest(str(i), (50, 60, 70 + i), each))
    for _ in range(3):
        engine.step()
    reads = HostReads(monkeypatch)
    deltas = engine.step()
    assert len(deltas) == len(params)
    assert all(delta.token_ids for _, delta in deltas)
    return reads.num


def test_only_a_nucleus_wider_than_its_short_list_costs_a_second_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(truncation, "SHORT_LIST", 2)
    wide = SamplingParams(temperature=2, seed=3, top_p=0.9, max_tokens=20)
    assert reads_of_a_step(monkeypatch, (wide,) * 5) == 2


def test_a_read_too_many_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "guess_nuclei", read_nuclei)
    nucleus = SamplingParams(temperature=1, seed=3, top_p=0.5, max_tokens=20)
    assert reads_of_a_step(monkeypatch, (nucleus,)) == 2


def test_a_prefill_step_reads_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(load(qwen2))
    engine.add(SequenceRequest("s", tuple(range(50, 90)), GREEDY))
    reads = HostReads(monkeypatch)
    assert engine.step() == []
    assert reads.num == 0
    assert len(engine.step()) == 1
    assert reads.num == 1
