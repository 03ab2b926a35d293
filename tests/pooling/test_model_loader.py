import gc
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooling.model_outline import load_outline, num_positions
from deployments.pooling.packed_backbone import PackedBackbone
from tests.pooling.tiny_classifiers import LABELS, bert, mpnet, qwen2, roberta
from tests.pooling.tiny_folder import framing_tokenizer, load, save_classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("roberta"))


def test_a_folder_is_loaded_and_packed(folder: Path) -> None:
    loaded = load(folder)
    assert isinstance(loaded.model.base_model, PackedBackbone)
    assert loaded.labels == tuple(LABELS.values())
    assert loaded.model.dtype is torch.float32
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    # Merged weights count once; the token embeddings are not tied here.
    assert loaded.num_weight_bytes == sum(p.nbytes for p in stock.parameters())


@pytest.mark.slow
def test_a_loaded_model_does_not_hold_its_file(folder: Path) -> None:
    loaded = load(folder)
    gc.collect()
    mapped = {each.path for each in psutil.Process().memory_maps()}
    assert str(folder / "model.safetensors") not in mapped
    assert loaded.num_weight_bytes


@pytest.mark.parametrize(("asked", "given"), [(4096, 128), (128, 128), (100, 100)])
def test_the_longest_text_is_bounded_by_the_configuration_and_the_model_s_positions(
    folder: Path, asked: int, given: int
) -> None:
    assert load(folder, max_model_len=asked).max_model_len == given


@pytest.mark.parametrize(
    ("model", "expected"), [(roberta(), 128), (bert(), 130), (mpnet(), 128), (qwen2(), 130)]
)
def test_positions_that_a_family_never_uses_do_not_count(
    model: PreTrainedModel, expected: int
) -> None:
    assert num_positions(model) == expected
    if expected < 130:
        model(input_ids=torch.full((1, expected), 5))


def test_a_model_without_positions_has_no_bound() -> None:
    model = qwen2()
    model.config.max_position_embeddings = -1
    assert num_positions(model) is None


def test_a_model_that_was_not_trained_to_classify_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    backbone: Any = roberta().base_model
    backbone.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"lacks 4 weights.*trained as a classifier"):
        load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    roberta().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="can't load"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("id2label", "labels"), [({"0": 0, "1": 1, "2": 2}, ("0", "1", "2")), ({"0": 0, "5": 1}, None)]
)
def test_the_labels_of_a_folder_are_names_or_the_model_is_refused(
    tmp_path: Path, id2label: dict[str, int], labels: tuple[str, ...] | None
) -> None:
    path = save_classifier(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": id2label}))
    if labels is not None:
        assert load(tmp_path).labels == labels
        return
    for read in (load, lambda _: load_outline(str(tmp_path), revision=None)):
        with pytest.raises(UnsupportedModelError, match="none for the output 1"):
            read(tmp_path)


def test_weights_that_do_not_fit_the_labels_are_refused_by_name(tmp_path: Path) -> None:
    path = save_classifier(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "a"}}))
    with pytest.raises(UnsupportedModelError, match="is 3 in the files and 1 by"):
        load(tmp_path)


def test_files_that_every_model_is_refused_for_are_refused(tmp_path: Path) -> None:
    path = save_classifier(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    assert load(tmp_path).labels
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UnsupportedModelError, match=r"is quantized \(awq\)"):
        load(tmp_path)


def test_a_token_that_the_model_has_no_embedding_for_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    tokenizer = framing_tokenizer()
    tokenizer.add_tokens(["fox"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no embedding for, 'fox' with id 30"):
        load(tmp_path)


def test_an_empty_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="can't load") as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)


def test_remote_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    save_classifier(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = "made_up"
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    path.write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UnsupportedModelError, match="can't load"):
        load(tmp_path)
