from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2_5_VLConfig,
)
from transformers.cache_utils import get_layer_types_and_kwargs

from deployments.plan.model_shape import ModelShape, choose_dtype_name
from tests.engine.tiny_models import FAMILIES, Family
from tests.hub_configs import config_file, shape_of
from tests.offenders import for_each

AUTO: Mapping[str, Any] = {
    "qwen2.5-7b-instruct": AutoModelForCausalLM,
    "llama-3.1-8b-instruct": AutoModelForCausalLM,
    "gemma-3-12b-it": AutoModelForImageTextToText,
    "radar-vicuna-7b": AutoModelForSequenceClassification,
}


def num_weights(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", AUTO)
def test_weights_are_counted_to_a_thousandth_from_the_configuration(name: str) -> None:
    with torch.device("meta"):
        model = AUTO[name].from_config(AutoConfig.from_pretrained(config_file(name)))
    assert shape_of(name).weights.total == pytest.approx(num_weights(model), rel=1e-3)


def test_the_weights_of_a_tower_for_images_of_any_size_are_counted() -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    tower = {"hidden_size": 1280, "out_hidden_size": 1024}
    config = Qwen2_5_VLConfig(text_config={**sizes, "vocab_size": 1000}, vision_config=tower)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
            config
        )
    assert ModelShape.of(config).weights.total == pytest.approx(num_weights(model), rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.make.__name__)
def test_each_family_is_read_as_its_model_is_made(family: Family) -> None:
    model = family.make()
    shape, text = ModelShape.of(model.config), model.config.get_text_config()
    options = get_layer_types_and_kwargs(text)[1]
    assert shape.windows == tuple(each.get("sliding_window") for each in options)
    assert shape.has_images == hasattr(model.config, "vision_config")
    # Their widths are so small that norms and biases, which are not counted, show. GPT-2 ignores
    # the width that these tests give to all of them.
    if model.config.model_type != "gpt2":
        assert shape.weights.total == pytest.approx(num_weights(model), rel=0.07)


def test_positions_end_where_longrope_changes() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 48,
        "long_factor": [1.0] * 48,
        "original_max_position_embeddings": 4096,
    }
    config = Phi3Config(max_position_embeddings=131_072, rope_parameters=rope)
    assert ModelShape.of(config).max_positions == 4096
    assert ModelShape.of(LlamaConfig(max_position_embeddings=100)).max_positions == 100


def test_a_missing_size_is_named() -> None:
    config = LlamaConfig(num_hidden_layers=0)
    with pytest.raises(ValueError, match="the configuration of a llama has no num_hidden_layers"):
        ModelShape.of(config)


@for_each(
    ("bfloat16", "auto", False, True, "bfloat16"),
    ("float16", "auto", False, True, "float16"),
    ("float16", "auto", True, True, "float32"),
    ("bfloat16", "auto", True, True, "bfloat16"),
    ("bfloat16", "auto", True, False, "float32"),
    ("float32", "bfloat16", True, False, "bfloat16"),
)
def test_the_type_of_the_weights(
    stored: str, asked: str, on_cpu: bool, has_bf16: bool, chosen: str
) -> None:
    assert choose_dtype_name(stored, asked, on_cpu=on_cpu, has_bf16=has_bf16) == chosen


def test_the_type_is_also_found_beside_a_composite_models_parts() -> None:
    assert shape_of("gemma-3-12b-it").dtype == "bfloat16"


def test_bytes_of_tied_and_quantized_weights() -> None:
    weights = shape_of("qwen2.5-7b-instruct").weights
    assert weights.num_bytes("bfloat16", on_cpu=True) == 2 * weights.total
    tied = shape_of("gemma-3-12b-it").weights
    assert tied.num_bytes("bfloat16", on_cpu=False) == 2 * tied.total
    assert tied.num_bytes("bfloat16", on_cpu=True) == 2 * (tied.total + tied.head)
    plain, scales = 2 * (tied.total - tied.linear), 2 * ((tied.linear + tied.head) // 32)
    in_int8 = tied.num_bytes("bfloat16", on_cpu=True, quantization="int8")
    assert in_int8 == plain + tied.linear + tied.head + scales
    in_int4 = tied.num_bytes("bfloat16", on_cpu=True, quantization="int4")
    assert in_int4 == plain + tied.linear // 2 + tied.head + scales
    without_bf16 = tied.num_bytes("bfloat16", on_cpu=True, quantization="int4", has_bf16=False)
    assert without_bf16 == in_int4 + scales  # float32
