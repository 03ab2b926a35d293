"""That the allowlist of engine_args is of this vLLM: the names, and the types of their values."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.vllm_args import VllmArgs
from deployments.vllm_engine.start import arguments

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

GIVEN = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 2**30,
    "block_size": 16,
    "cpu_offload_gb": 1.5,
    "cudagraph_capture_sizes": [1, 2],
    "max_lora_rank": 32,
    "limit_mm_per_prompt": {"image": 4},
}


def test_vllm_has_every_key_that_is_allowed_or_refused() -> None:
    known = {field.name for field in fields(AsyncEngineArgs)}
    assert VllmArgs.model_fields.keys() - known == set()
    assert VllmArgs.refused_keys.keys() - known == set()


@pytest.mark.parametrize("after_s", [None, 60])
def test_only_a_model_that_sleeps_on_a_gpu_gets_memory_that_can_be_given_back(
    after_s: float | None,
) -> None:
    model = ModelConfig(id="m", source="m", engine="vllm", dtype="float16")
    spec = ModelSpec(model.model_copy(update={"light_sleep_after_s": after_s}), "m", 1.0)
    assert arguments(spec, on_cpu=False)["enable_sleep_mode"] is (after_s is not None)
    assert "enable_sleep_mode" not in arguments(spec, on_cpu=True)


def test_vllm_takes_the_values_as_the_file_has_them() -> None:
    given = VllmArgs.model_validate(GIVEN).given
    made = AsyncEngineArgs(model="m", **given)
    assert {name: getattr(made, name) for name in given} == given
    assert made.limit_mm_per_prompt == {"image": 4}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16", "quantization_config": {"quant_method": "awq"}}, "auto"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "float32"}, "torch_dtype": "float16"}, "float32"),
    ],
)
def test_the_type_of_weights_is_read_for_models_that_only_vllm_knows(
    tmp_path: Path, config: dict[str, Any], dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of vLLM alone", **config}))
    entry = {"id": "m", "source": str(tmp_path), "engine": "vllm"}
    spec = ModelSpec(ModelConfig.model_validate(entry), str(tmp_path), 0.0)
    assert arguments(spec, on_cpu=True)["dtype"] == dtype
