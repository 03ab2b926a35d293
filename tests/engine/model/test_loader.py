import gc
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from deployments.compute.cpu.linear.prepacked_linear import can_prepack
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.attention.attention import ATTENTION_NAME
from deployments.engine.model.loader import LoadedModel, load_config, load_model
from deployments.plan.weight_count import counted_shape
from tests.deployments.tiny_folder import save_text_model
from tests.engine.tiny_models import EOS_TOKEN_ID, SHAPE, gemma3, mixtral, qwen2
from tests.failing import failing

CPU = torch.device("cpu")
WEIGHT = "model.layers.1.mlp.down_proj.weight"
FP4 = torch.tensor([sign * n for sign in (1, -1) for n in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
"""Source: OCP, Microscaling Formats (MX) Specification 1.0, 5.3.3, E2M1."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        socket.socket, "connect", failing(AssertionError("a folder is loaded without the network"))
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
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


def test_tied_weights_are_not_missing_and_count_once_for_each_copy_in_memory(
    tmp_path: Path,
) -> None:
    config = Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    loaded = load(save_text_model(tmp_path, Qwen2ForCausalLM(config)), "bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    # Rows are read from the embeddings, logits from their reordered copy where there is one.
    copies = [stored["model.embed_tokens.weight"]] if can_prepack(torch.bfloat16) else []
    tensors = (*stored.values(), *copies)
    assert loaded.num_weight_bytes == sum(tensor.numel() * 2 for tensor in tensors)


@pytest.mark.slow
def test_a_loaded_model_does_not_hold_its_file(folder: Path) -> None:
    loaded = load(folder)
    gc.collect()
    mapped = {each.path for each in psutil.Process().memory_maps()}
    assert str(folder / "model.safetensors") not in mapped
    assert loaded.num_weight_bytes


def test_eos_tokens_are_the_tokenizers_if_the_model_names_none(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == {EOS_TOKEN_ID}


def configure(folder: Path, **values: Any) -> None:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_kernels_that_a_configuration_names_are_not_asked_for(folder: Path, tmp_path: Path) -> None:
    configure(folder, attn_implementation="flash_attention_2")
    assert load(folder).text_config._attn_implementation == ATTENTION_NAME
    configure(folder, attn_implementation=None, _attn_implementation="flash_attention_3")
    assert load(folder).text_config._attn_implementation == ATTENTION_NAME
    experts = save_text_model(tmp_path / "experts", mixtral())
    configure(experts, experts_implementation="sonicmoe")
    assert load(experts).text_config._experts_implementation != "sonicmoe"


def test_a_part_s_kernels_are_not_asked_for_either(tmp_path: Path) -> None:
    gemma3().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for part in ("text_config", "vision_config"):
        config[part]["attn_implementation"] = "flash_attention_2"
    path.write_text(json.dumps(config))
    found = load_config(str(tmp_path), revision=None)
    parts: Any = (found, found.text_config, found.vision_config)
    for each in parts:
        assert each._attn_implementation is None


def test_an_empty_quantization_is_none(folder: Path) -> None:
    configure(folder, quantization_config={})
    assert load(folder).num_weight_bytes
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "is quantized (gptq)" in refusal(folder)


def test_mxfp4_weights_become_plain_ones(tmp_path: Path) -> None:
    """Each byte holds two weights, and each 32 weights of an output share a power of two."""
    torch.manual_seed(0)
    sizes = {**SHAPE, "num_hidden_layers": 1, "intermediate_size": 32, "num_key_value_heads": 2}
    made = GptOssConfig(**sizes, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    save_text_model(tmp_path, GptOssForCausalLM(made))
    weights = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = weights.pop(name).shape
        blocks = torch.randint(256, (num_experts, num_outputs, num_inputs // 32, 16)).byte()
        scales = torch.randint(120, 126, (num_experts, num_outputs, num_inputs // 32)).byte()
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
        plain = FP4[halves] * 2.0 ** (scales[..., None].float() - 127)
        expected[name] = plain.flatten(-2).transpose(1, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    configure(tmp_path, quantization_config={"quant_method": "mxfp4"})
    loaded = load(tmp_path)
    assert len(expected) == 2
    for name, plain in expected.items():
        assert torch.equal(loaded.model.get_parameter(name), plain)
    config = load_config(str(tmp_path), revision=None)
    # The files hold fewer numbers than the loaded model.
    assert counted_shape(config, str(tmp_path), None, is_pooler=False).weights.is_estimate


def test_an_adapter_is_refused_instead_of_its_base_model_being_served(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "has an adapter (adapter_config.json)" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has an adapter (adapter_config.json)" in refusal(folder)


def test_a_missing_folder_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path)


def test_pickled_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    assert "no file named model.safetensors" in refusal(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
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
    assert f"{WEIGHT} is 3 x 3 in the files and 32 x 48 by config.json" in refusal(folder)


def test_weights_that_do_not_fit_together_are_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    save_text_model(tmp_path, MixtralForCausalLM(config))
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.block_sparse_moe.experts.1.w1.weight"] = torch.zeros(48, 31)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "stack expects each tensor to be equal size, but got [48, 32]" in refusal(tmp_path)
    assert "Traceback" not in caplog.text


def test_a_rotation_that_transformers_does_not_know_is_named(folder: Path) -> None:
    path = folder / "config.json"
    rope = {"rope_type": "su", "rope_theta": 10_000.0, "factor": 4.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    assert "sets rope_parameters.rope_type to 'su', which transformers" in refusal(folder)


def test_a_model_without_its_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer files" in refusal(folder)
