from collections.abc import Mapping
from re import search
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    LlamaConfig,
    MptConfig,
    PaliGemmaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.model.support import check_config, check_layers, check_length, has_images
from tests.engine.tiny_models import MODELS, SHAPE, load, make_engine, qwen2_sliding

MROPE: Mapping[str, Any] = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
SOFTCAPPED: Mapping[str, Any] = {"model_type": "gemma2", "use_bidirectional_attention": False}


def config_of(model_type: str, **options: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **options)
    return config


REFUSED_CONFIGS: Mapping[str, tuple[PreTrainedConfig, str]] = {
    "encoder": (config_of("t5"), "t5 models with an encoder beside the decoder"),
    "latent attention": (config_of("deepseek_v3"), r"latent attention \(kv_lora_rank\)"),
    "linear attention": (config_of("qwen3_next"), "layers of type linear_attention"),
    "state space": (config_of("jamba"), "layers of type linear_attention"),
    "state space beside attention": (config_of("falcon_h1"), "layers of type hybrid"),
    "convolutions": (config_of("lfm2", layer_types=["conv"] * 32), "layers of type conv"),
    "no attention": (config_of("rwkv"), "no attention heads"),
    "chunks": (config_of("llama4_text"), "layers of type chunked_attention"),
    "chunks of all layers": (
        config_of("llama", attention_chunk_size=8), r"\(attention_chunk_size\)"
    ),
    "indexed attention": (config_of("deepseek_v32"), "layers of type indexed_attention"),
    "shared keys": (config_of("gemma3n_text"), "share keys and values"),
    "heads by layer": (config_of("gemma4_text"), "heads that differ from layer to layer"),
    "numbers of heads by layer": (config_of("dots3_note"), "heads that differ from layer to layer"),
    "cross-attention by layer": (config_of("mllama_text_model"), "cross-attention"),
    "cross-attention": (config_of("gpt2", add_cross_attention=True), "cross-attention"),
    "ALiBi in Falcon": (config_of("falcon", alibi=True), r"biases on positions \(alibi\)"),
    "ALiBi in MPT": (MptConfig(), r"biases on positions \(alibi\)"),
    "mrope": (Qwen2VLConfig(text_config=dict(MROPE), vision_config={}), "mrope_section"),
    "mrope by layer": (
        config_of("llama", rope_parameters={"full_attention": {
            "rope_type": "default", "rope_theta": 1.0, "mrope_section": [1, 1]}},
            layer_types=["full_attention"] * 32), "mrope_section",
    ),
    "bidirectional": (
        Gemma3Config(text_config={"use_bidirectional_attention": True}), "bidirectional attention",
    ),
    "softcap beside images": (
        PaliGemmaConfig(text_config=dict(SOFTCAPPED)), "images beside softcapped attention",
    ),
}  # fmt: skip


def refusal(config: PreTrainedConfig) -> str:
    try:
        check_config(config)
    except UnsupportedModelError as error:
        return str(error)
    return "supported"


def test_an_unsupported_configuration_is_refused_by_feature() -> None:
    found = {name: refusal(config) for name, (config, _) in REFUSED_CONFIGS.items()}
    offenders = {
        n: found[n] for n, (_, why) in REFUSED_CONFIGS.items() if not search(why, found[n])
    }
    assert offenders == {}


def test_supported_families_pass() -> None:
    for make_model in MODELS.values():
        check_config(make_model().config)


def test_the_configuration_shows_whether_a_model_takes_images() -> None:
    assert has_images(Gemma3Config())
    assert not has_images(Qwen2Config())


WINDOW: Mapping[str, Any] = {"sliding_window": 7}
DECODER: Mapping[str, Any] = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "is_encoder_decoder": False,
}  # fmt: skip

REFUSED_MODELS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "a window only in the mask": (
        "qwen2_moe",
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 2,
         "num_experts_per_tok": 1, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "num_key_value_heads": 2},
        "attends to 96 tokens, but by the configuration its sliding window is 7",
    ),
    "a window only in the mask, in all layers": (
        "phimoe",
        {**WINDOW, "num_local_experts": 2, "num_key_value_heads": 2},
        "layer 0 attends to 96 tokens",
    ),
    "two passes of attention": ("diffllama", {"num_key_value_heads": 2}, "layer 0 attends twice"),
    "layers that run twice": ("hrm_text", {"head_dim": 8}, "attends twice"),
    "a mask of its own": ("doge", {"num_key_value_heads": 2}, "a mask of the model's own"),
    "looking ahead": ("bert", {}, "look ahead"),
    "ALiBi": ("bloom", {}, "a forward pass that takes no position_ids"),
    "positions of its own": ("bart", DECODER, "takes no position_ids"),
    "positions that do not start at zero": (
        "roberta", {"is_decoder": True}, "positions that don't count from zero",
    ),
    "more than text": ("xmod", {}, "does not run on text only: Input language unknown"),
    "no logits_to_keep": ("trocr", DECODER, "takes no logits_to_keep"),
    "attention of its own": ("gptj", {"rotary_dim": 4}, "an attention of their own"),
    "arguments not passed on": (
        "stablelm", {"num_key_value_heads": 2}, "do not pass their arguments on to attention",
    ),
    "heads other than the configuration says": (
        "jetmoe",
        {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 2},
        "keys have 4 heads of 8 elements",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "options", "feature"), REFUSED_MODELS.values(), ids=REFUSED_MODELS
)
def test_a_feature_that_only_the_model_shows_is_refused_by_name(
    model_type: str, options: Mapping[str, Any], feature: str
) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        config_of(model_type, **{**SHAPE, "num_hidden_layers": 2, **options})
    )
    check_config(model.config)
    with pytest.raises(UnsupportedModelError, match=feature):
        make_engine(load(lambda: model)).warm_up()


def test_positions_shifted_by_images_are_refused_even_if_the_configuration_does_not_say_so() -> (
    None
):
    text = {**SHAPE, "num_key_value_heads": 2}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=vision)
    check_config(config)
    with pytest.raises(UnsupportedModelError, match="rope_deltas"):
        load(lambda: Qwen2VLForConditionalGeneration(config))


def test_layers_that_did_not_attend_are_named() -> None:
    check_layers(qwen2_sliding().config, {0, 1, 2})
    with pytest.raises(
        UnsupportedModelError, match=r"layers \[0, 2\] keep state other than keys and values"
    ):
        check_layers(qwen2_sliding().config, {1})


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    config = LlamaConfig(max_position_embeddings=100)
    check_length(config, 100)
    with pytest.raises(UnsupportedModelError, match="the model has 100 positions"):
        check_length(config, 101)


def test_a_length_at_which_longrope_positions_depend_on_the_batch_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    config = config_of(
        "phi3",
        **SHAPE,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=rope,
    )
    check_length(config, 32)
    with pytest.raises(UnsupportedModelError, match="beyond 32 positions"):
        check_length(config, 33)
