import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.checkpoint import QUANTIZED_FILES, check_checkpoint
from tests.failing import failing
from tests.hub_configs import FOLDER

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
COMMIT = "0" * 40


def folder_with(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    return folder


def refusal(source: Path | str, **options: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_checkpoint(str(source), None, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": AWQ}, "awq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ({"compression_config": {"format": "pack-quantized"}}, "compressed-tensors"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"text_config": {"quantization_config": AWQ}}, "awq"),
        ({"thinker_config": {"text_config": {"quantization_config": AWQ}}}, "awq"),
    ],
)
def test_quantized_weights_are_refused_by_their_method(
    tmp_path: Path, config: dict[str, Any], method: str
) -> None:
    found = refusal(folder_with(tmp_path, **config))
    assert f"is quantized ({method})" in found
    assert str(tmp_path) in found


@pytest.mark.parametrize(("name", "method"), QUANTIZED_FILES.items())
def test_the_files_of_older_tools_mark_quantized_weights_too(
    tmp_path: Path, name: str, method: str
) -> None:
    (folder_with(tmp_path) / name).write_text("{}")
    assert f"is quantized ({method})" in refusal(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"quantization": None},
        {"vision_config": {"hidden_size": 8}, "text_config": None},
    ],
)
def test_unquantized_weights_pass(tmp_path: Path, config: dict[str, Any]) -> None:
    check_checkpoint(str(folder_with(tmp_path, **config)), None)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_a_file_that_can_not_be_read_is_left_to_the_loader(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    check_checkpoint(str(tmp_path), None)
    check_checkpoint(str(tmp_path / "nothing"), None)


def test_an_adapter_is_refused_with_and_without_a_model_beside_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has an adapter (adapter_config.json), which is not applied" in refusal(tmp_path)
    assert refusal(folder_with(tmp_path)).endswith("to serve the model without it")


def test_a_configuration_by_itself_can_be_checked(tmp_path: Path) -> None:
    check_checkpoint(str(FOLDER / "qwen2.5-7b-instruct.json"), None)
    file = folder_with(tmp_path, quantization_config=AWQ) / "config.json"
    assert "awq" in refusal(file)


def test_of_a_hub_s_model_the_cached_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    check_checkpoint("org/model", None, local_only=True)
    repo = tmp_path / "models--org--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    folder_with(snapshot, quantization_config=AWQ)
    assert "'org/model' is quantized (awq)" in refusal("org/model", local_only=True)

    monkeypatch.setattr(
        "deployments.plan.checkpoint.hf_hub_download",
        failing(AssertionError("the hub was asked about a model that is in the cache")),
    )
    assert "'org/model' is quantized (awq)" in refusal("org/model")
