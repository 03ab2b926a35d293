import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from deployments.compute.kept_files import DIGEST_BYTES, TRACES
from deployments.compute.traced_model import kept_trace
from deployments.compute.traced_model.traced_graph import NotTraceableError
from deployments.pooling import traced_backbone
from deployments.pooling.model_loader import prepare
from deployments.pooling.packed_attention import AttendedRow
from deployments.pooling.packed_backbone import PackedBackbone, pad
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.probe_texts import ProbeTexts
from deployments.pooling.traced_backbone import TracedBackbone
from tests.compute.traced_model.same_program import assert_same_program
from tests.pooling.tiny_classifiers import LAYOUTS, MODELS, bert, gpt2, modernbert, qwen2, roberta
from tests.pooling.tiny_folder import framing_tokenizer

pytestmark = pytest.mark.slow

PACKED = [name for name in MODELS if name not in LAYOUTS]

TEXTS: Sequence[tuple[int, ...]] = (
    (2, *range(5, 30), 3),
    (2, 7, 3),
    (2, *range(40, 49), 3),
    (2, 3),
)

TYPES = ((*[0] * 10, *[1] * 17), None, (*[0] * 4, *[1] * 7), None)
"""The types of the texts' tokens."""


def prepared(model: PreTrainedModel) -> PoolingModel:
    probes = ProbeTexts.of(model, framing_tokenizer())
    layout = prepare(model, torch.device("cpu"), 128, probes)
    return PoolingModel(model, layout, probes.of_length(1))


def backbone_of(model: PreTrainedModel) -> PackedBackbone:
    backbone = model.base_model
    assert isinstance(backbone, PackedBackbone)
    return backbone


def untraced(model: PreTrainedModel) -> PoolingModel:
    made = prepared(model)
    backbone_of(model).traced = None
    return made


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of traces, which is empty."""
    folder = tmp_path / "traces"
    monkeypatch.setattr(kept_trace, "TRACES", replace(TRACES, folder_name=str(folder)))
    return folder


def assert_starts_are_equal(make_model: Callable[[], PreTrainedModel], traces: Path) -> None:
    """Require that a start that reads the trace runs what the start that made it runs."""
    starts, rows = [], []
    for is_kept in (False, True):
        model = make_model()
        rows.append(prepared(model)(TEXTS))
        start = backbone_of(model).traced
        assert isinstance(start, TracedBackbone)
        assert start.was_kept is is_kept
        starts.append(start)
    made, read = starts
    assert torch.equal(*rows)
    assert_same_program(made._graph, read._graph)
    assert (made._fused is None) == (read._fused is None)
    if made._fused is not None and read._fused is not None:
        assert_same_program(made._fused, read._fused)
    assert len(list(traces.iterdir())) == 1


@pytest.mark.parametrize("name", PACKED)
def test_a_trace_from_disk_is_the_one_that_was_made(name: str, traces: Path) -> None:
    assert_starts_are_equal(MODELS[name], traces)


@pytest.mark.parametrize("other", [b"torch aten.relu.default", b"torch aten.select.int"])
def test_a_trace_from_disk_that_gives_other_states_or_fails_is_made_again(
    other: bytes, traces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = prepared(roberta())(TEXTS)
    (path,) = traces.iterdir()
    stored = path.read_bytes()
    twisted = stored[DIGEST_BYTES:].replace(b"torch aten.gelu.default", other)
    assert twisted != stored[DIGEST_BYTES:]
    path.write_bytes(sha256(twisted).digest() + twisted)
    model = roberta()
    assert torch.equal(prepared(model)(TEXTS), expected)
    assert "traced again" in caplog.text
    traced = backbone_of(model).traced
    assert isinstance(traced, TracedBackbone)
    assert not traced.was_kept
    assert path.read_bytes() == stored


@pytest.mark.parametrize("name", PACKED)
def test_each_packed_model_runs_as_a_trace_that_gives_the_same_rows(name: str) -> None:
    model = MODELS[name]()
    traced = prepared(model)
    assert backbone_of(model).traced is not None
    expected = untraced(MODELS[name]())(TEXTS)
    torch.testing.assert_close(traced(TEXTS), expected, rtol=1e-5, atol=1e-5)


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
"""Layers as wide as our kernel takes."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [roberta, modernbert, qwen2])
def test_layers_on_our_kernel_give_the_rows_of_the_stock_backbone(
    kind: Callable[..., PreTrainedModel], dtype: torch.dtype
) -> None:
    models = [kind(**WIDE, initializer_range=0.05) for _ in range(2)]
    for model in models:
        model.to(dtype)  # type: ignore[arg-type] # transformers narrows `to` to its own types
    traced, stock = prepared(models[0]), untraced(models[1])
    assert backbone_of(models[0]).traced is not None
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    texts = (*TEXTS, (7,))
    torch.testing.assert_close(traced(texts), stock(texts), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_from_disk_uses_our_kernel_as_the_one_that_was_made(
    dtype: torch.dtype, traces: Path
) -> None:
    def make_model() -> PreTrainedModel:
        model = qwen2(**WIDE)
        torch.nn.Module.to(model, dtype)
        return model

    assert_starts_are_equal(make_model, traces)


@pytest.mark.parametrize(("make_model", "takes_types"), [(bert, True), (gpt2, False)])
def test_a_pair_s_types_count(
    make_model: Callable[[], PreTrainedModel], *, takes_types: bool
) -> None:
    """To GPT-2 a text without types is none of zeros, so its trace takes no types."""
    model = make_model()
    traced, stock = prepared(model), untraced(make_model())
    trace = backbone_of(model).traced
    assert trace is not None
    assert trace.takes(torch.tensor([[0, 1]])) == takes_types
    found = traced(TEXTS, TYPES)
    torch.testing.assert_close(found, stock(TEXTS, TYPES), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0], traced(TEXTS)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_s_states_are_the_same_to_the_bit_in_any_company(dtype: torch.dtype) -> None:
    """With 1,536 inputs oneDNN adds in another order for other numbers of rows."""
    model = roberta(**{**WIDE, "intermediate_size": 1536})
    model.to(dtype)  # type: ignore[arg-type] # transformers narrows `to` to its own types
    prepared(model)
    backbone = backbone_of(model)
    assert backbone.traced is not None
    batch, mask = pad(list(map(torch.tensor, TEXTS)), 1)
    with torch.inference_mode():
        together = backbone(batch, mask)["last_hidden_state"]
        for text, hidden in zip(TEXTS, together, strict=True):
            ids = torch.tensor([text])
            alone = backbone(ids, torch.ones_like(ids))["last_hidden_state"][0]
            assert torch.equal(alone, hidden[: len(text)])


def test_what_a_trace_does_not_give_is_computed_by_the_stock_backbone() -> None:
    model = roberta()
    prepared(model)
    ids = torch.tensor([TEXTS[0]])
    mask = torch.ones_like(ids)
    assert model(input_ids=ids, attention_mask=mask).hidden_states is None
    states = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1


def refuse(*_: object, **__: object) -> TracedBackbone:
    raise NotTraceableError("it looks at the values")


def test_a_model_that_cannot_be_traced_keeps_its_stock_backbone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traced_backbone, "TracedBackbone", refuse)
    model = roberta()
    with caplog.at_level(logging.INFO):
        made = prepared(model)
    assert backbone_of(model).traced is None
    assert "not traced: NotTraceableError: it looks at the values" in caplog.text
    assert made(TEXTS).isfinite().all()


class Wrong(TracedBackbone):
    """Its fused trace is wrong, and its plain one too if it says so."""

    is_plain_wrong = False
    factor = 2.0

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None,
        row: AttendedRow,
    ) -> ModelOutput:
        output = super().__call__(ids, positions, types, row)
        if self._fused is not None or self.is_plain_wrong:
            output["last_hidden_state"] = output["last_hidden_state"] * self.factor
        return output


class Worse(Wrong):
    is_plain_wrong = True


class NotANumber(Worse):
    """Its traces give no finite numbers."""

    factor = torch.nan


@pytest.mark.parametrize("kind", [Worse, NotANumber])
def test_a_trace_that_gives_other_rows_is_not_used(
    kind: type[TracedBackbone], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traced_backbone, "TracedBackbone", kind)
    model = MODELS["qwen2"]()
    with caplog.at_level(logging.INFO):
        prepared(model)
    assert backbone_of(model).traced is None
    assert "not traced: its hidden states would differ" in caplog.text


def test_fused_operators_that_give_other_rows_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traced_backbone, "TracedBackbone", Wrong)
    model = MODELS["qwen2"]()
    made = prepared(model)
    assert backbone_of(model).traced is not None
    assert "operators are not fused" in caplog.text
    expected = untraced(MODELS["qwen2"]())(TEXTS)
    torch.testing.assert_close(made(TEXTS), expected, rtol=1e-5, atol=1e-5)
