import json
from pathlib import Path
from typing import Any

import pytest

from deployments.contract.model_spec import ModelSpec
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.contract.vllm_args import VllmArgs
from deployments.vllm_engine.adapters import (
    CONFIG_FILE,
    WEIGHT_FILE,
    adapter_arguments,
    read_adapters,
)
from tests.deployments.tiny_folder import spec


def save(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, **config}))
    (folder / WEIGHT_FILE).write_bytes(b"")
    return folder


def with_adapters(*folders: Path) -> ModelSpec:
    adapters = [{"id": each.name, "source": str(each)} for each in folders]
    return spec("m", engine="vllm", adapters=adapters)


def refusal(folder: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        read_adapters(with_adapters(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"can't load the adapter {folder.name!r}")
    return message


def test_adapters_are_found_and_vllm_makes_room_for_all_of_them(tmp_path: Path) -> None:
    model = with_adapters(save(tmp_path / "a"), save(tmp_path / "b", r=24))
    adapters = read_adapters(model)
    assert [(each.id, each.number, each.rank) for each in adapters] == [("a", 1, 4), ("b", 2, 24)]
    assert adapters[0].folder == tmp_path / "a"
    assert adapter_arguments(adapters, VllmArgs(), on_cpu=False) == {
        "enable_lora": True,
        "max_lora_rank": 32,
        "max_loras": 2,
        "max_cpu_loras": 2,
    }
    given = VllmArgs(max_loras=1, max_lora_rank=64)
    assert adapter_arguments(adapters, given, on_cpu=False) == {
        "enable_lora": True,
        "max_lora_rank": 64,
        "max_loras": 1,
        "max_cpu_loras": 2,
    }
    on_cpu = adapter_arguments(adapters, given, on_cpu=True)
    assert (on_cpu["max_loras"], on_cpu["max_cpu_loras"]) == (3, 3)  # the last one stays empty
    with pytest.raises(UnsupportedModelError, match="max_lora_rank is 8"):
        adapter_arguments(adapters, VllmArgs(max_lora_rank=8), on_cpu=False)
    assert adapter_arguments((), VllmArgs(), on_cpu=False) == {}


def test_an_adapter_that_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nowhere")
    other = save(tmp_path / "other", peft_type="IA3")
    assert "of no LoRA adapter (peft_type: IA3)" in refusal(other)
    assert "its rank is 1024" in refusal(save(tmp_path / "high", r=1024))
    pickled = save(tmp_path / "pickled")
    (pickled / WEIGHT_FILE).rename(pickled / "adapter_model.bin")
    assert f"it has no {WEIGHT_FILE}" in refusal(pickled)
    damaged = save(tmp_path / "damaged")
    (damaged / CONFIG_FILE).write_text("{")
    assert "is damaged" in refusal(damaged)
