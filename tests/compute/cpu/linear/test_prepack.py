import logging
from collections.abc import Iterator
from pathlib import Path
from weakref import ref

import pytest
import torch

from deployments.compute.cpu.attention.row_attention import can_attend_rows
from deployments.compute.cpu.linear import prepacked_linear
from deployments.compute.cpu.linear.packed_linear import PackedLinear
from deployments.compute.cpu.linear.prepack import leave_file, num_prepacked_bytes, prepack
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.compute.cpu.linear.quantized_linear import Int8Linear, quantization_obstacle
from deployments.compute.merged_linear import MergedLinearPart
from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import ChunkRows
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.model.traced_forward import TracedForward
from deployments.plan.kv_layout import KVLayout
from tests.compute.cpu.linear.linears import assert_near, linear, rows_of
from tests.engine.tiny_models import MODELS, byte_tokenizer, load, qwen2, qwen3_moe


class Special(torch.nn.Linear):
    """A subclass of nn.Linear, which may compute something else."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return -super().forward(rows)


class Attention(torch.nn.Module):
    """Attention with the layer names of transformers' models."""

    def __init__(self, *, biases: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        self.q_proj = linear(24, 24, bias=biases[0])
        self.k_proj = linear(24, 8, bias=biases[1])
        self.v_proj = linear(24, 8, bias=biases[2])
        self.o_proj = linear(24, 24)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        both = self.k_proj(rows) * self.v_proj(rows)
        output: torch.Tensor = self.o_proj(self.q_proj(rows) * both.repeat(1, 3))
        return output


def names(model: torch.nn.Module, kind: type[torch.nn.Module]) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is kind}


def test_nested_layers_are_replaced_and_siblings_share_one_product() -> None:
    model = torch.nn.Sequential(linear(24, 24), torch.nn.ModuleDict({"a": Attention()}))
    attention, rows = model.get_submodule("1.a"), rows_of(5, 24)
    expected = attention(model[0](rows))
    prepack(model)
    assert not names(model, torch.nn.Linear)
    assert names(attention, MergedLinearPart) == {"q_proj", "k_proj", "v_proj"}
    assert_near(attention(model[0](rows)), expected)


def test_siblings_are_not_merged_if_some_lack_a_bias() -> None:
    attention, rows = Attention(biases=(True, False, False)), rows_of(5, 24)
    expected = attention(rows)
    prepack(attention)
    assert not names(attention, MergedLinearPart)
    assert names(attention, PrepackedLinear) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert_near(attention(rows), expected)


def test_a_sibling_of_another_kind_stays_and_the_others_are_replaced_one_by_one() -> None:
    attention, rows = Attention(), rows_of(5, 24)
    attention.k_proj = Special(24, 8).requires_grad_(requires_grad=False)
    expected = attention(rows)
    prepack(attention)
    assert names(attention, Special) == {"k_proj"}
    assert names(attention, PrepackedLinear) == {"q_proj", "v_proj", "o_proj"}
    assert_near(attention(rows), expected)


def test_weights_without_other_references_are_freed() -> None:
    attention = Attention()
    weights = [ref(parameter) for parameter in attention.parameters()]
    prepack(attention)
    assert [weight() for weight in weights] == [None] * len(weights)


def test_tied_weights_stay_in_the_embedding_that_also_reads_them() -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(30, 24), "head": linear(24, 30, bias=False)}
    )
    embed, head = model["embed"], model["head"]
    assert isinstance(embed, torch.nn.Embedding)
    embed.requires_grad_(requires_grad=False)
    head.weight = embed.weight
    rows, token_ids = rows_of(5, 24), torch.tensor([3, 7])
    expected, embedded = head(rows), embed(token_ids)
    prepack(model)
    assert isinstance(model["head"], PrepackedLinear)
    assert_near(model["head"](rows), expected)
    assert torch.equal(model["embed"](token_ids), embedded)


def test_what_stays_as_it_is_does_not_hold_the_file_that_it_was_read_from() -> None:
    """Tied weights stay tied."""
    file = torch.randn(1000)
    model = torch.nn.ModuleDict(
        {"norm": torch.nn.LayerNorm(24), "embed": torch.nn.Embedding(9, 24)}
    )
    norm, embed = model["norm"], model["embed"]
    assert isinstance(norm, torch.nn.LayerNorm)
    assert isinstance(embed, torch.nn.Embedding)
    norm.weight = torch.nn.Parameter(file[10:34])
    embed.weight = torch.nn.Parameter(file[40:256].view(9, 24))
    other = torch.nn.Embedding(9, 24)
    other.weight = embed.weight
    model["other"] = other
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepack(model)
    leave_file(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert other.weight is embed.weight


def test_experts_are_replaced_if_they_are_linear_layers() -> None:
    experts = torch.nn.ModuleList(
        torch.nn.ModuleDict({"gate_proj": linear(24, 16), "up_proj": linear(24, 16)})
        for _ in range(2)
    )
    prepack(experts)
    assert names(experts, MergedLinearPart) == {
        f"{i}.{name}" for i in range(2) for name in ("gate_proj", "up_proj")
    }


@pytest.mark.parametrize("make_model", [qwen2, qwen3_moe])
def test_a_model_on_the_cpu_is_loaded_without_plain_linear_layers(make_model: object) -> None:
    assert callable(make_model)
    model = load(make_model).model
    assert not names(model, torch.nn.Linear)
    assert {"lm_head"} < names(model, PrepackedLinear)
    assert "model.layers.0.self_attn.q_proj" in names(model, MergedLinearPart)


def test_the_bytes_of_all_layers_are_counted_once() -> None:
    attention = Attention()
    num_bytes = sum(parameter.nbytes for parameter in attention.parameters())
    prepack(attention)
    assert num_prepacked_bytes(attention) == num_bytes


def test_layers_that_can_not_be_prepacked_stay_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    can_prepack.cache_clear()
    monkeypatch.setattr(prepacked_linear, "_ops", object)
    attention = Attention()
    with caplog.at_level(logging.WARNING):
        prepack(attention)
    can_prepack.cache_clear()
    assert names(attention, torch.nn.Linear) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


REFUSAL = "bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq"


class RefusingOperators:
    """Operators on a processor without AVX512: they refuse bfloat16 only."""

    def _reorder_linear_weight(self, weight: torch.Tensor, batch_hint: int) -> torch.Tensor:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError(f"{REFUSAL}\nraised from somewhere in C++")
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, batch_hint)
        assert isinstance(packed, torch.Tensor)
        return packed

    def __getattr__(self, name: str) -> object:
        return getattr(torch.ops.mkldnn, name)


@pytest.fixture
def refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    can_prepack.cache_clear()
    monkeypatch.setattr(prepacked_linear, "_ops", RefusingOperators)
    yield
    can_prepack.cache_clear()


@pytest.mark.usefixtures("refuses_bfloat16")
def test_layers_in_bfloat16_stay_on_a_processor_that_refuses_them_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = [linear(24, 40, dtype=torch.bfloat16) for _ in range(3)]
    model = torch.nn.Sequential(*layers, linear(24, 40))
    prepack(model)
    prepack(torch.nn.Sequential(*layers))
    assert list(model)[:3] == layers
    assert isinstance(model[3], PrepackedLinear)
    (message,) = [record.getMessage() for record in caplog.records]
    assert REFUSAL in message
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.usefixtures("refuses_bfloat16")
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_a_bfloat16_model_that_can_not_be_prepacked_gives_stock_logits(
    tmp_path: Path, name: str
) -> None:
    stock = MODELS[name]().bfloat16().train(mode=False)
    stock.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), revision=None, dtype="bfloat16", device=torch.device("cpu"))
    assert loaded.model.dtype is torch.bfloat16
    assert not names(loaded.model, PrepackedLinear)
    prompt = list(range(50, 62))
    with torch.inference_mode():
        expected = stock(torch.tensor([prompt])).logits[0, -1]
        found = engine_logits(loaded, prompt)
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=0.02 * expected.abs().max())


def engine_logits(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Return the logits after a prompt, as the engine computes them."""
    shape = KVShape.of(loaded.text_config, loaded.model.dtype)
    capacities = shape.group_capacities(16)
    starts = (0,) * len(capacities)
    layout = KVLayout(capacities, (1,) * len(capacities), 16)
    kv = KVCache(
        shape,
        layout,
        max_model_len=16,
        device=torch.device("cpu"),
        attends_in_place=can_attend_rows(shape.head_dim, shape.dtype),
    )
    step = PackedStep(kv, (), (), (ChunkRows(0, starts, 0, len(prompt)),))
    inputs = (
        torch.tensor([prompt]),
        torch.arange(len(prompt))[None],
        torch.tensor([len(prompt) - 1]),
    )
    return TracedForward(loaded.model, has_kernels=True)(*inputs, step)[0]


def test_a_layer_of_an_unknown_dtype_stays() -> None:
    layer = torch.nn.Sequential(linear(24, 40, dtype=torch.float64))
    prepack(layer)
    assert names(layer, torch.nn.Linear) == {"0"}


class Watch(torch.nn.Module):
    """Records at each visit whether a weight is still in memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = ref(weight)
        self.is_held: list[bool] = []

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        self.is_held.append(self.weight() is not None)
        return super().named_children()


@pytest.mark.slow
@pytest.mark.parametrize("layer", [PrepackedLinear, Int8Linear])
def test_weights_are_freed_layer_by_layer(layer: type[PackedLinear]) -> None:
    if layer is Int8Linear and quantization_obstacle():
        pytest.skip(str(quantization_obstacle()))
    first = torch.nn.Sequential(torch.nn.Linear(32, 4), torch.nn.Identity())
    watch = Watch(first.get_parameter("0.weight"))
    prepack(torch.nn.Sequential(first, watch), layer)
    assert isinstance(first[0], layer)
    assert not watch.is_held[-1]
