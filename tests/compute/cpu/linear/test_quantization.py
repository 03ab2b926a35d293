from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from deployments.compute.cpu.linear import quantization
from deployments.compute.cpu.linear.int8_linear import Int8Linear, int8_obstacle
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear
from deployments.compute.cpu.linear.quantization import linear_fraction
from deployments.compute.errors import UnsupportedModelError
from deployments.engine.model.loader import LoadedModel, load_model, prepare_model
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.model_shape import ModelShape
from deployments.replica_plan import DeviceMemory, plan_replica
from tests.deployments.tiny_folder import save_text_model
from tests.deployments.tiny_folder import spec as generator_spec
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

pytestmark = pytest.mark.skipif(int8_obstacle() is not None, reason=str(int8_obstacle()))

CPU = torch.device("cpu")


class ReferenceLayer(torch.nn.Module):
    """An int8 layer by its formula, in plain torch and float64."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._scales = linear.weight.abs().amax(-1).clamp_min(1e-30).double() / 127
        self._weight = torch.round(linear.weight / self._scales[:, None])
        self._bias = 0 if linear.bias is None else linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scales = rows.abs().amax(-1, keepdim=True).clamp_min(1e-30).double() / 127
        sums = torch.round(rows / scales) @ self._weight.T
        return (sums * scales * self._scales + self._bias).to(rows.dtype)


def load_int8(make_model: Callable[[], PreTrainedModel]) -> LoadedModel:
    model = make_model()
    prepare_model(model, "int8")
    return LoadedModel(model, byte_tokenizer(), None, frozenset({EOS_TOKEN_ID}))


def reference_model(make_model: Callable[[], PreTrainedModel]) -> Any:
    """Return the stock model on reference layers."""
    model = make_model().train(mode=False).requires_grad_(requires_grad=False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, ReferenceLayer(child))
    return model


def prompts() -> list[tuple[int, ...]]:
    random = Random(0)
    return [random_prompt(random, length) for length in (3, 9, 30, 17, 5, 41)]


@pytest.mark.parametrize("make_model", [qwen2, qwen3, phi3, gemma3_text, opt])
def test_the_engine_equals_generate_on_reference_layers(
    make_model: Callable[[], PreTrainedModel],
) -> None:
    requests = [SequenceRequest(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts())]
    collector = run_staggered(make_engine(load_int8(make_model)), requests)
    stock = reference_model(make_model)
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


def test_only_the_language_model_and_its_logits_are_int8() -> None:
    model: Any = load_int8(gemma3).model
    kinds = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, Int8Linear | PrepackedLinear | torch.nn.Linear)
    }
    assert kinds["lm_head"] is Int8Linear
    assert kinds["model.language_model.layers.0.mlp.down_proj"] is Int8Linear
    assert kinds["model.vision_tower.encoder.layers.0.self_attn.out_proj"] is PrepackedLinear
    for name, kind in kinds.items():
        assert (kind is Int8Linear) == (".vision_tower." not in name), name


def test_the_bytes_held_are_counted(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    folder = save_text_model(tmp_path, Qwen2ForCausalLM(config))
    loaded = load_model(
        str(folder), revision=None, dtype="bfloat16", device=CPU, quantization="int8"
    )
    embeddings, norms = 300 * 32 * 2, 3 * 32 * 2
    outputs = {"qkv": 64, "o": 32, "gate_up": 96, "down": 32, "logits": 300}
    inputs = {"down": 48}
    weights = sum(count * inputs.get(name, 32) for name, count in outputs.items())
    scales, biases = 4 * sum(outputs.values()), 4 * outputs["qkv"]
    assert loaded.num_weight_bytes == embeddings + norms + weights + scales + biases


def test_a_step_needs_room_for_float32_between_int8_layers() -> None:
    spec = generator_spec(Path("m"), dtype="bfloat16", max_num_seqs=1, max_batched_tokens=32)
    shape, device = ModelShape.of(qwen2().config), DeviceMemory(2**30, on_cpu=True)

    def token_bytes(quantization: str | None) -> int:
        small, large = (
            plan_replica(
                replace(spec, quantization=quantization, max_batched_tokens=num), shape, device
            ).demand.activation_bytes
            for num in (32, 64)
        )
        return large - small

    assert token_bytes("int8") == 2 * token_bytes(None)


@pytest.mark.parametrize(("make_model", "name"), [(mixtral, "mixtral"), (gpt2, "gpt2")])
def test_a_model_with_few_weights_in_linear_layers_is_refused(
    make_model: Callable[[], PreTrainedModel], name: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{name} models .* in linear layers"):
        prepare_model(make_model(), "int8")


def test_the_fraction_of_linear_layers_excludes_embeddings() -> None:
    decoder = torch.nn.Sequential(
        torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 3, bias=False), torch.nn.LayerNorm(4)
    )
    assert linear_fraction(decoder) == 24 / (24 + 8)


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
    assert "'int4' is unknown; known: int8" in refusal("int4", "cpu")


def test_a_machine_without_int8_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "int8_obstacle", lambda: "it is too old")
    assert "can't run here: it is too old" in refusal("int8", "cpu")
