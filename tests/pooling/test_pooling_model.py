import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig, PreTrainedModel

from deployments.pooling.model_loader import prepare
from deployments.pooling.packed_backbone import PackedBackbone
from deployments.pooling.pooling_model import PoolingModel, choose_activation
from deployments.pooling.probe_texts import ProbeTexts
from tests.failing import failing
from tests.pooling.tiny_classifiers import LAYOUTS, MODELS, SHAPE, roberta
from tests.pooling.tiny_folder import framing_tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BEGIN, END = 2, 3
token_ids = st.lists(st.integers(4, SHAPE["vocab_size"] - 1), max_size=40).map(
    lambda words: (BEGIN, *words, END)
)


@functools.cache
def stock(name: str) -> PreTrainedModel:
    return MODELS[name]()


def prepared(model: PreTrainedModel) -> PoolingModel:
    probes = ProbeTexts.of(model, framing_tokenizer())
    layout = prepare(model, CPU, 128, probes)
    return PoolingModel(model, layout, probes.of_length(1))


@functools.cache
def classifier(name: str) -> PoolingModel:
    return prepared(MODELS[name]())


@torch.inference_mode()
def alone(name: str, sequence: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = stock(name)(input_ids=torch.tensor([sequence])).logits
    return logits.softmax(-1)[0]


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_gets_the_fastest_layout_that_is_correct(name: str) -> None:
    assert classifier(name).layout == LAYOUTS.get(name, "packed")
    assert classifier(name)([classifier(name).probe]).isfinite().all()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), torch.AcceleratorError("illegal access")]
)
def test_short_memory_and_a_lost_device_do_not_show_that_a_model_is_to_be_padded(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedBackbone, "forward", failing(error))
    with pytest.raises(type(error)):
        prepared(roberta())


def test_that_texts_run_one_by_one_is_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepared(MODELS["xlnet"]())
    assert "xlnet models run texts one by one" in caplog.text
    assert "depend on the padding" in caplog.text


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None)
@given(batch=st.lists(token_ids, min_size=1, max_size=12))
def test_a_batch_equals_the_stock_model_on_each_text_by_itself(
    name: str, batch: list[tuple[int, ...]]
) -> None:
    together = classifier(name)(batch)
    assert together.dtype is torch.float32
    for sequence, found in zip(batch, together, strict=True):
        torch.testing.assert_close(found, alone(name, sequence), atol=1e-5, rtol=1e-5)


def on_one_thread(made: PoolingModel, batch: list[tuple[int, ...]]) -> torch.Tensor:
    torch.set_num_threads(1)  # only for the calling thread, as a lane does
    return made(batch)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5, deadline=None)
@given(batches=st.lists(st.lists(token_ids, min_size=1, max_size=6), min_size=2, max_size=8))
def test_batches_on_several_lanes_equal_the_stock_model(
    name: str, batches: list[list[tuple[int, ...]]]
) -> None:
    with ThreadPoolExecutor(max_workers=3) as lanes:
        found = list(lanes.map(functools.partial(on_one_thread, classifier(name)), batches))
    for batch, together in zip(batches, found, strict=True):
        for sequence, each in zip(batch, together, strict=True):
            torch.testing.assert_close(each, alone(name, sequence), atol=1e-5, rtol=1e-5)


def test_a_lane_s_number_of_threads_is_its_own() -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(max_workers=1) as lane:
        lane.submit(torch.set_num_threads, before + 1).result()
        assert lane.submit(torch.get_num_threads).result() == before + 1
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)  # for later threads too


def test_bfloat16_is_packed_too_and_near_float32() -> None:
    model = roberta(initializer_range=0.1)
    exact = PoolingModel(roberta(initializer_range=0.1), "padded", (5,))
    model.to(torch.bfloat16)  # type: ignore[arg-type] # transformers narrows `to` to its own types
    rounded = prepared(model)
    assert rounded.layout == "packed"
    batch = [tuple(range(5, 5 + n)) for n in (3, 60, 1, 17, 17)]
    torch.testing.assert_close(rounded(batch), exact(batch), atol=0.02, rtol=0)


def test_only_the_text_with_infinite_logits_is_not_finite() -> None:
    model: Any = roberta()
    embeddings = model.roberta.embeddings.word_embeddings.weight
    classifier = prepared(model)
    with torch.no_grad():
        embeddings[7] = torch.inf
    found = classifier([(2, 3), (2, 7, 3), (4,)])
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("problem_type", "num_labels", "expected"),
    [
        (None, 2, "softmax"),
        ("single_label_classification", 3, "softmax"),
        ("multi_label_classification", 3, "sigmoid"),
        (None, 1, "sigmoid"),
        ("regression", 1, "identity"),
    ],
)
def test_probabilities_are_made_as_transformers_pipeline_makes_them(
    problem_type: str | None, num_labels: int, expected: str
) -> None:
    options: dict[str, Any] = {"problem_type": problem_type, "num_labels": num_labels}
    config = PreTrainedConfig(**options)
    assert choose_activation(config) == expected


def test_multi_label_probabilities_are_independent() -> None:
    model = roberta(problem_type="multi_label_classification")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[5, 6]])).logits
    torch.testing.assert_close(prepared(model)([(5, 6)]), logits.sigmoid())
