import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
)

from deployments.engine.attention import ATTENTION_NAME
from deployments.engine.model_check import UnsupportedModelError
from deployments.engine.model_loader import (
    LoadedModel,
    choose_dtype,
    load_model,
)
from tests.deployments.tiny_folder import save_text_model
from tests.engine.tiny_models import EOS_TOKEN_ID, qwen2

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a folder is loaded without the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may spoil."""
    copy = tmp_path / "model"
    shutil.copytree(saved, copy)
    return copy


def load(folder: Path, dtype: str = "auto") -> LoadedModel:
    return load_model(str(folder), revision=None, dtype=dtype, device=CPU)


def refusal(folder: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_folder_becomes_a_model_that_attends_over_slots(folder: Path) -> None:
    loaded = load(folder, "float32")
    assert not loaded.model.training
    assert loaded.text_config._attn_implementation == ATTENTION_NAME
    assert loaded.processor is None
    assert loaded.eos_token_ids == {EOS_TOKEN_ID}
    stock = qwen2()
    rows = torch.randn(2, 48)
    down = loaded.model.get_submodule(WEIGHT.removesuffix(".weight"))(rows)
    assert torch.allclose(down, rows @ stock.state_dict()[WEIGHT].T, atol=1e-5)
    assert loaded.num_weight_bytes == sum(p.numel() * 4 for p in stock.parameters())


def test_tied_weights_are_not_missed_and_count_as_often_as_they_are_held(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    loaded = load(save_text_model(tmp_path, Qwen2ForCausalLM(config)), "bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    reordered = stored["model.embed_tokens.weight"]  # once for reading rows, once for the logits
    tensors = (*stored.values(), reordered)
    assert loaded.num_weight_bytes == sum(tensor.numel() * 2 for tensor in tensors)


def test_the_end_of_a_text_is_the_tokenizers_where_the_model_names_none(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == {EOS_TOKEN_ID}


def test_a_folder_that_is_not_there_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)


def test_pickled_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    assert "no file named model.safetensors" in refusal(folder)


def test_weights_that_are_cut_off_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "header" in refusal(folder)


def spoil(folder: Path, weight: torch.Tensor | None) -> None:
    """Replace a weight in the file, or leave it out."""
    weights = load_file(folder / "model.safetensors")
    del weights[WEIGHT]
    if weight is not None:
        weights[WEIGHT] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_weight_is_named_instead_of_drawn_at_random(folder: Path) -> None:
    spoil(folder, None)
    assert WEIGHT in refusal(folder)


def test_a_weight_of_another_shape_is_refused(folder: Path) -> None:
    spoil(folder, torch.zeros(3, 3))
    assert "mismatched" in refusal(folder)


def test_a_model_without_its_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer files" in refusal(folder)


@pytest.mark.parametrize(
    ("stored", "asked", "device", "has_bf16", "chosen"),
    [
        ("bfloat16", "auto", CPU, True, torch.bfloat16),
        ("bfloat16", "auto", CPU, False, torch.float32),
        ("bfloat16", "auto", CUDA, False, torch.bfloat16),
        ("float16", "auto", CPU, True, torch.float32),
        ("float16", "auto", CUDA, True, torch.float16),
        ("float32", "auto", CPU, True, torch.float32),
        (None, "auto", CUDA, True, torch.float32),
        ("bfloat16", "float32", CPU, True, torch.float32),
        ("float32", "float16", CPU, True, torch.float16),
    ],
)
def test_the_dtype_is_the_files_unless_the_cpu_is_slow_at_it(
    monkeypatch: pytest.MonkeyPatch,
    stored: str | None,
    asked: str,
    device: torch.device,
    has_bf16: bool,
    chosen: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    assert choose_dtype(Qwen2Config(dtype=stored), asked, device) is chosen
