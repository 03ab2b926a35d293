import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.contract.descriptions import ModelDescription
from deployments.contract.model_spec import ModelSpec
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.model.loader import load_model
from deployments.file_description import describe_files
from deployments.generator.description import describe_model
from deployments.generator.prompt_encoder import PromptEncoder
from tests.deployments.tiny_folder import spec

PYDOC_CHAT = Path(__file__).resolve().parents[2] / "models/pydoc-chat"
MAX_MODEL_LEN = 500


def test_the_root_is_the_hub_repository_and_never_a_path() -> None:
    assert spec("org/model", id="m").root == "org/model"
    assert spec("/srv/models/tiny", id="m").root == "m"


def described_by_a_replica(model: ModelSpec) -> ModelDescription:
    entry, cpu = model.entry, torch.device("cpu")
    loaded = load_model(model.source, revision=None, dtype=entry.dtype, device=cpu)
    encoder = PromptEncoder(loaded.tokenizer, loaded.processor, entry.reasoning_parser)
    generation = loaded.model.generation_config
    described = describe_model(model, loaded.tokenizer, generation, MAX_MODEL_LEN, encoder, "fp")
    return replace(described, system_fingerprint=None, created=0)


@pytest.mark.parametrize("has_generation_config", [True, False])
def test_files_describe_a_model_as_its_replicas_do(
    tmp_path: Path, has_generation_config: bool
) -> None:
    for file in PYDOC_CHAT.iterdir():
        if file.is_file() and (has_generation_config or file.name != "generation_config.json"):
            (tmp_path / file.name).symlink_to(file)
    model = spec(str(tmp_path), id="m", max_model_len=MAX_MODEL_LEN)
    assert replace(describe_files(model), created=0) == described_by_a_replica(model)


def test_a_length_that_replicas_choose_is_described_as_the_model_s_own() -> None:
    model = spec(str(PYDOC_CHAT), id="m", max_model_len="auto")
    assert describe_files(model).max_model_len == 2048


def test_a_model_without_a_chat_template_is_described_as_a_base_model(tmp_path: Path) -> None:
    for file in PYDOC_CHAT.iterdir():
        if file.is_file() and file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    assert describe_files(spec(str(PYDOC_CHAT), id="m")).has_chat_template
    assert not describe_files(spec(str(tmp_path), id="m")).has_chat_template


def test_a_kind_of_model_that_only_vllm_knows_is_described_from_its_files(tmp_path: Path) -> None:
    for file in PYDOC_CHAT.iterdir():
        if file.is_file() and file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = {"model_type": "of-next-year", "vocab_size": 4096, "max_position_embeddings": 77}
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe_files(spec(str(tmp_path), id="m", engine="vllm", max_model_len="auto"))
    assert described.max_model_len == 77
    assert (described.engine, described.is_exact) == ("vllm", False)
    own = describe_files(spec(str(PYDOC_CHAT), id="m"))
    assert (own.engine, own.is_exact) == ("raystream", None)
    assert described.has_chat_template
    assert described.default_sampling == own.default_sampling
    with pytest.raises(UnsupportedModelError):
        describe_files(spec(str(tmp_path), id="m"))
