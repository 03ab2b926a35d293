from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from deployments.compute.cpu.linear import quantized_linear
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear
from deployments.compute.cpu.linear.quantization import QUANTIZATIONS, linear_fraction
from deployments.compute.cpu.linear.quantized_linear import (
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    quantization_obstacle,
    quantize,
)
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.model.loader import LoadedModel, load_model, prepare_model
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.model_shape import ModelShape
from deployments.plan.processor import has_bfloat16
from tests.deployments.tiny_folder import save_text_model
from tests.engine.collector import GREEDY, random_prompt, run_staggered
from tests.engine.tiny_models import (
    EOS_TOKEN_ID,
    byte_tokenizer,
    gemma3,
    gemma3_text,
    gpt2,
    make_engine,
    mixtral,
    opt,
    phi3,
    qwen2,
    qwen3,
)

pytestmark = pytest.mark.skipif(
    quantization_obstacle() is not None, reason=str(quantization_obstacle())
)

CPU = torch.device("cpu")


class ReferenceLayer(torch.nn.Module):
    """A quantized layer by its formula, in plain torch and float64."""

    def __init__(self, linear: torch.nn.Linear, weight_bits: int) -> None:
        super().__init__()
        integers, scales = quantize(linear.weight, weight_bits, torch.float32)
        self._weight = integers * scales.double().repeat_interleave(32, 1)
        self._bias = 0 if linear.bias is None else linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rows.double() @ self._weight.T + self._bias
        return found.to(rows.dtype)


def load_quantized(make_model: Callable[[], PreTrainedModel], quantization: str) -> LoadedModel:
    model = make_model()
    prepare_model(model, quantization)
    return LoadedModel(model, byte_tokenizer(), None, frozenset({EOS_TOKEN_ID}))


def reference_model(make_model: Callable[[], PreTrainedModel], quantization: str) -> Any:
    """Return the stock model on reference layers."""
    model = make_model().train(mode=False).requires_grad_(requires_grad=False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and QuantizedLinear.fits(child):
                weight_bits = 4 if quantization == "int4" and name != "lm_head" else 8
                setattr(module, name, ReferenceLayer(child, weight_bits))
    return model


def prompts() -> list[tuple[int, ...]]:
    random = Random(0)
    return [random_prompt(random, length) for length in (3, 9, 30, 17, 5, 41)]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("make_model", [qwen2, qwen3, phi3, gemma3_text, opt])
def test_the_engine_equals_generate_on_reference_layers(
    make_model: Callable[[], PreTrainedModel], quantization: str
) -> None:
    requests = [SequenceRequest(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts())]
    collector = run_staggered(make_engine(load_quantized(make_model, quantization)), requests)
    stock = reference_model(make_model, quantization)
    for i, prompt in enumerate(prompts()):
        input_ids = torch.tensor([prompt])
        output = stock.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=0,
        )
        assert collector.token_ids(str(i)) == output[0, len(prompt) :].tolist(), i


def test_only_the_language_model_and_its_logits_are_quantized() -> None:
    model: Any = load_quantized(gemma3, "int4").model
    kinds = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear | PrepackedLinear | torch.nn.Linear)
    }
    assert kinds["lm_head"] is Int8Linear
    assert kinds["model.language_model.layers.0.self_attn.o_proj"] is Int4Linear
    assert kinds["model.vision_tower.encoder.layers.0.self_attn.out_proj"] is PrepackedLinear
    assert kinds["model.language_model.layers.0.mlp.down_proj"] is PrepackedLinear  # 48 inputs
    for name, kind in kinds.items():
        if name.endswith("down_proj"):
            continue
        assert issubclass(kind, QuantizedLinear) == (".vision_tower." not in name), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_bytes_held_are_counted(tmp_path: Path, dtype: str, quantization: str) -> None:
    """All sizes are multiples of a block; biases are held in float32, also for layers without."""
    config = Qwen2Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    folder = save_text_model(tmp_path, Qwen2ForCausalLM(config))
    loaded = load_model(
        str(folder), revision=None, dtype=dtype, device=CPU, quantization=quantization
    )
    norms, outputs = 3 * 64, {"qkv": 128, "o": 64, "gate_up": 256, "down": 64, "logits": 320}
    planned = ModelShape.of(config).weights.num_bytes(
        dtype, on_cpu=True, quantization=quantization, has_bf16=has_bfloat16()
    )
    item = {"float32": 4, "bfloat16": 2}[dtype]
    assert loaded.num_weight_bytes == planned + item * norms + 4 * sum(outputs.values())


@pytest.mark.parametrize(("make_model", "name"), [(mixtral, "mixtral"), (gpt2, "gpt2")])
def test_a_model_with_few_weights_in_linear_layers_is_refused(
    make_model: Callable[[], PreTrainedModel], name: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{name} models .* in linear layers"):
        prepare_model(make_model(), "int4")


def test_the_fraction_of_linear_layers_excludes_embeddings() -> None:
    decoder = torch.nn.Sequential(
        torch.nn.Embedding(1000, 32),
        torch.nn.Linear(32, 3, bias=False),
        torch.nn.Linear(8, 2, bias=False),
        torch.nn.LayerNorm(4),
    )
    assert linear_fraction(decoder) == 96 / (96 + 16 + 8)


def refusal(name: str, device: str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(
            "/no/such/folder",
            revision=None,
            dtype="auto",
            device=torch.device(device),
            quantization=name,
        )
    return str(caught.value)


def test_other_devices_and_unknown_names_are_refused_before_loading() -> None:
    assert "runs only on a CPU, and the device is cuda" in refusal("int8", "cuda")
    assert "'int3' is unknown; known: int8, int4" in refusal("int3", "cpu")


def test_a_machine_without_the_kernel_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_linear, "quantization_obstacle", lambda: "it is too old")
    assert "can't run here: it is too old" in refusal("int8", "cpu")
