"""Packed texts on a GPU, with the CPU or `meta` in place of one."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from threading import Barrier
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deployments.pooling import packed_attention, pooling_model
from deployments.pooling.model_loader import prepare, takes_flash_attention
from deployments.pooling.packed_attention import register_attention
from deployments.pooling.packed_backbone import Packing, known, pack
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.probe_texts import ProbeTexts
from tests.engine.fake_varlen import FakeVarlen
from tests.engine.test_launch_budget import Launches
from tests.pooling.tiny_classifiers import SHAPE, bert, mistral, modernbert, qwen2, roberta
from tests.pooling.tiny_folder import framing_tokenizer

CPU, META = torch.device("cpu"), torch.device("meta")
LENGTHS = (5, 17, 2, 9)
FAMILIES = {
    "RoBERTa": roberta,
    "BERT": bert,
    "ModernBERT, with windows": modernbert,
    "a decoder with fewer heads of keys": qwen2,
    "a decoder with windows": mistral,
}
DEADLINE_S = 20


def texts() -> list[tuple[int, ...]]:
    return [
        tuple(4 + (7 * i + j) % (SHAPE["vocab_size"] - 4) for j in range(n))
        for i, n in enumerate(LENGTHS)
    ]


def packed(model: PreTrainedModel) -> PoolingModel:
    """Return a model that packs its texts, with its weights as they are."""
    probes = ProbeTexts.of(model, framing_tokenizer())
    register_attention()
    model.train(mode=False).requires_grad_(requires_grad=False)
    model.config.use_cache = False
    assert pack(model, texts())
    return PoolingModel(model, "packed", probes.of_length(1))


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@contextmanager
def packed_as_on_a_gpu(lengths: Sequence[int]) -> Iterator[None]:
    packing = Packing.of(lengths, max(lengths), CPU)
    with known(replace(packing, starts=starts_of(lengths))):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_flash_attention_gives_the_rows_of_a_call_for_each_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooling = packed(FAMILIES[name]())
    expected = pooling(texts())
    varlen = FakeVarlen(monkeypatch, torch.float32, module=packed_attention)
    with packed_as_on_a_gpu(LENGTHS):
        found = pooling(texts())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert varlen.num_calls == SHAPE["num_hidden_layers"]


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.slow
def test_wrong_starts_change_the_rows(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pooling = packed(roberta())
    expected = pooling(texts())
    FakeVarlen(monkeypatch, torch.float32, module=packed_attention)
    wrong = starts_of(LENGTHS)
    wrong[1:-1] += shift
    with known(replace(Packing.of(LENGTHS, max(LENGTHS), CPU), starts=wrong)):
        found = pooling(texts())
    assert not torch.allclose(found, expected, atol=1e-5, rtol=1e-4)


class OnMeta:
    """A classifier that was packed, on `meta` as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.varlen = FakeVarlen(monkeypatch, device="meta", module=packed_attention)
        pooling = packed(roberta())
        self.model: Any = pooling.model
        torch.nn.Module.to(self.model, META, torch.bfloat16)
        self.pooling = PoolingModel(self.model, "packed", pooling.probe)

    def launches(self, packing: Packing | None) -> Launches:
        """Run a batch whose inputs are on the device; return what it launched."""
        shape = len(LENGTHS), max(LENGTHS)
        inputs = {
            name: torch.zeros(shape, dtype=torch.int64, device=META)
            for name in ("input_ids", "attention_mask")
        }
        launches = Launches()
        with torch.inference_mode(), known(packing), launches:
            self.pooling._scores(inputs)
        return launches


@pytest.mark.slow
def test_a_batch_waits_for_no_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta = OnMeta(monkeypatch)
    packing = Packing.of(LENGTHS, max(LENGTHS), META)
    assert packing.starts is not None
    assert (packing.starts.device, packing.starts.dtype) == (META, torch.int32)
    on_meta.launches(packing)
    assert on_meta.varlen.num_calls == SHAPE["num_hidden_layers"]


@pytest.mark.slow
def test_a_batch_that_reads_its_mask_on_the_host_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_meta = OnMeta(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        on_meta.launches(None)


class WaitingTogether:
    """Stands in for `fetch`: no rows arrive before two batches have been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._both = Barrier(2, timeout=DEADLINE_S)
        monkeypatch.setattr(pooling_model, "fetch", lambda rows: self)

    def wait(self) -> torch.Tensor:
        self._both.wait()
        return torch.zeros(1)


@pytest.mark.slow
def test_the_next_batch_is_launched_while_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta = OnMeta(monkeypatch)
    WaitingTogether(monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(on_meta.pooling, texts()) for _ in range(2)]
        assert all(len(call.result(DEADLINE_S)) == 1 for call in calls)


@pytest.mark.parametrize(
    ("dtype", "changes", "takes"),
    [
        (torch.bfloat16, {}, True),
        (torch.float16, {}, True),
        (torch.float32, {}, False),
        (torch.bfloat16, {"hidden_size": 48}, False),  # four heads of 12
    ],
)
def test_what_flash_attention_refuses_is_padded(
    dtype: torch.dtype, changes: dict[str, Any], takes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = roberta(**changes)
    torch.nn.Module.to(model, dtype)
    assert takes_flash_attention(model) is takes
    with caplog.at_level(logging.WARNING):
        layout = prepare(model, META, 128, ProbeTexts.of(model, framing_tokenizer()))
    assert layout != "packed"  # no layout can be tried on `meta`
    assert ("texts are padded: flash attention takes no heads of" in caplog.text) is not takes
