import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooler_description import describe_files, describe_model
from deployments.pooling.sentence_files import SentenceFiles, read_sentence_files
from tests.pooling.tiny_embedders import bert, save_embedder
from tests.pooling.tiny_folder import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_embedder(
        tmp_path,
        lambda: bert(matryoshka_dimensions=[16, 8]),
        prompts={"query": "search: ", "document": "passage: "},
        default_prompt_name="query",
    )


def read(folder: Path) -> SentenceFiles:
    return read_sentence_files(str(folder), revision=None)


def embed_spec(folder: Path) -> ModelSpec:
    entry = ModelConfig(id="e", source=str(folder), device="cpu", task="embed")
    return ModelSpec(entry, str(folder), 0)


class SlowTokenizer:
    """What the loader reads of a tokenizer that is no fast one."""

    all_special_tokens: ClassVar[list[str]] = []

    def __len__(self) -> int:
        return 9

    def get_vocab(self) -> dict[str, int]:
        return {}


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_files_say_how_vectors_are_made(folder: Path) -> None:
    files = read(folder)
    assert files.pooling == ("mean",)
    assert files.steps == ("normalize",)
    assert files.is_normalized
    assert dict(files.prompts) == {"query": "search: ", "document": "passage: "}
    assert files.default_prompt == "query"


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pools by 'max'"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "weightedmean"]}, "'weightedmean'"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task"),
        ("sentence_bert_config.json", {"query_length": 32}, "query_length"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs"),
        ("sentence_bert_config.json", {"model_args": {"adapter": "a"}}, "model_args: adapter"),
        ("sentence_bert_config.json", {"modality_config": {"image": {}}}, "modality_config"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "2_Normalize"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(
    folder: Path, file: str, changes: dict[str, Any], named: str
) -> None:
    change(folder / file, **changes)
    with pytest.raises(UnsupportedModelError) as refused:
        read(folder)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("kinds", "named"),
    [
        (["Transformer", "Pooling", "LSTM"], "a LSTM"),
        (["StaticEmbedding"], "begins with StaticEmbedding"),
        (["Transformer", "WordWeights", "Pooling"], "Transformer and WordWeights"),
    ],
)
def test_other_modules_are_refused_by_name(folder: Path, kinds: list[str], named: str) -> None:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"x.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match=named):
        read(folder)


def test_a_dense_layer_with_another_activation_is_refused(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path, dense=((32, 16, torch.nn.Tanh()),))
    change(folder / "2_Dense" / "config.json", activation_function="os.system")
    with pytest.raises(UnsupportedModelError, match=r"os\.system"):
        read(folder)


@pytest.mark.parametrize("key", ["in_features", "out_features", None])
def test_a_dense_layer_of_unknown_width_is_refused(tmp_path: Path, key: str | None) -> None:
    folder = save_embedder(tmp_path, dense=((32, 16, torch.nn.Tanh()),))
    path = folder / "2_Dense" / "config.json"
    if key is None:
        path.unlink()
    else:
        change(path, **{key: None})
    with pytest.raises(UnsupportedModelError, match=rf"names no {key or 'in_features'}"):
        read(folder)


def test_prompts_may_be_null(folder: Path) -> None:
    change(folder / "config_sentence_transformers.json", prompts=None, default_prompt_name=None)
    assert read(folder).prompts == ()


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "xlnet"])
def test_a_transformer_s_settings_may_lie_in_an_older_file(folder: Path, kind: str) -> None:
    name = f"sentence_{kind}_config.json"
    (folder / "sentence_bert_config.json").rename(folder / name)
    change(folder / name, max_seq_length=7)
    assert read(folder).max_seq_length == 7
    change(folder / name, query_length=32)
    with pytest.raises(UnsupportedModelError, match=f"{name} sets query_length"):
        read(folder)


def test_lower_case_needs_a_fast_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    slow = SlowTokenizer()
    monkeypatch.setattr("deployments.pooling.model_outline.load_tokenizer", lambda *_, **__: slow)
    with pytest.raises(UnsupportedModelError, match="fast tokenizer; the model's is a SlowTok"):
        load(folder, task="embed")


def test_only_dimensions_that_the_vectors_have_are_told(tmp_path: Path) -> None:
    for index, (width, told) in enumerate([(16, (8, 16)), (8, (8,)), (4, None)]):
        folder = save_embedder(
            tmp_path / str(index), lambda: bert(matryoshka_dimensions=[16, 8]), truncate_dim=width
        )
        found = describe_files(embed_spec(folder)).embedding
        assert found is not None
        assert (found.width, found.dimensions) == (width, told)


def test_a_sleeping_model_is_described_as_its_replicas_describe_it(folder: Path) -> None:
    spec = embed_spec(folder)
    loaded = load(folder, task="embed")
    told = describe_model(spec, loaded.model, loaded.max_model_len)
    assert told.embedding is not None
    assert (told.embedding.width, told.embedding.dimensions) == (32, (8, 16))
    assert told.embedding.default_prompt == "query"
    assert not told.labels
    asleep = describe_files(spec)
    assert (asleep.embedding, asleep.max_model_len) == (told.embedding, told.max_model_len)
