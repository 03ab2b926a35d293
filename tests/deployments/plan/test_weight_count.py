import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoConfig

from deployments.plan.model_shape import ModelShape
from deployments.plan.weight_count import count_weights
from tests.hub_configs import config_file

ROOT = Path(__file__).parents[3]


def test_weights_are_counted_in_the_headers_of_files() -> None:
    folder = ROOT / "models" / "pydoc-detector"
    assert count_weights(str(folder)) == pytest.approx(
        ModelShape.of(AutoConfig.from_pretrained(folder), is_pooler=True).weights.total, rel=0.05
    )
    assert count_weights(str(config_file("gemma-3-12b-it"))) is None


def test_only_the_files_that_are_loaded_are_counted(tmp_path: Path) -> None:
    for name, size in (("a", 3), ("b", 4), ("consolidated", 7)):
        save_file({name: np.zeros(size, np.float32)}, tmp_path / f"{name}.safetensors")
    assert count_weights(str(tmp_path)) is None
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_weights(str(tmp_path)) == 7
    save_file({"c": np.zeros(5, np.float32)}, tmp_path / "model.safetensors")
    assert count_weights(str(tmp_path)) == 5


def test_damaged_files_are_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert count_weights(str(tmp_path)) is None
