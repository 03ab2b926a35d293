"""How often a step looks at a tensor: each look makes the host wait for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deployments.engine import engine as engine_module
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.sequence import SequenceRequest
from tests.engine.recorded_graphs import Recorder
from tests.engine.tiny_models import load, make_engine, qwen2

LOOKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__")


class Looks:
    """Counts looks at tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        for name in LOOKS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, look: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.num += 1
            return look(*arguments)

        return counted


GREEDY = SamplingParams(temperature=0, max_tokens=20)
DRAWN = SamplingParams(temperature=1, seed=3, max_tokens=20)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("params", "num_looks"),
    [
        ((GREEDY,), 1),
        ((GREEDY, GREEDY, GREEDY), 1),
        # Whether logits are finite is looked at first: what follows could not bear it.
        ((DRAWN, GREEDY), 2),
        ((SamplingParams(temperature=1, seed=3, top_k=5, max_tokens=20),), 2),
        # How wide the nucleus is decides by which way it is cut.
        ((SamplingParams(temperature=1, seed=3, top_p=0.5, max_tokens=20),), 3),
        ((SamplingParams(temperature=0, top_logprobs=2, max_tokens=20),), 3),
        ((SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=20),), 1),
    ],
)
def test_a_decode_step_looks_at_the_device_as_rarely_as_it_can(
    monkeypatch: pytest.MonkeyPatch,
    params: tuple[SamplingParams, ...],
    num_looks: int,
    is_captured: bool,
) -> None:
    if is_captured:
        monkeypatch.setattr(engine_module, "open_capturer", lambda device: Recorder())
    engine = make_engine(load(qwen2))
    for i, each in enumerate(params):
        engine.add(SequenceRequest(str(i), (50, 60, 70 + i), each))
    for _ in range(3):
        engine.step()
    looks = Looks(monkeypatch)
    assert all(delta.token_ids for _, delta in engine.step())
    assert looks.num == num_looks


def test_a_prefill_step_looks_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(load(qwen2))
    engine.add(SequenceRequest("s", tuple(range(50, 90)), GREEDY))
    looks = Looks(monkeypatch)
    assert engine.step() == []
    assert looks.num == 0
    assert len(engine.step()) == 1
    assert looks.num == 1
