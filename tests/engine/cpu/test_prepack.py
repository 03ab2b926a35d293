import logging
from weakref import ref

import pytest
import torch

from deployments.engine.cpu import prepacked_linear
from deployments.engine.cpu.prepack import num_prepacked_bytes, prepack
from deployments.engine.cpu.prepacked_linear import PrepackedLinear, can_prepack
from deployments.engine.cpu.shared_input import SharedInputPart
from tests.engine.cpu.linears import assert_near, linear, rows_of
from tests.engine.tiny_models import load, qwen2, qwen3_moe


class Special(torch.nn.Linear):
    """A layer of somebody else's, who may have changed what it does."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return -super().forward(rows)


class Attention(torch.nn.Module):
    """Names as transformers' models have them."""

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
    assert names(attention, SharedInputPart) == {"q_proj", "k_proj", "v_proj"}
    assert_near(attention(model[0](rows)), expected)


def test_siblings_of_which_some_lack_a_bias_stay_apart() -> None:
    attention, rows = Attention(biases=(True, False, False)), rows_of(5, 24)
    expected = attention(rows)
    prepack(attention)
    assert not names(attention, SharedInputPart)
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


def test_weights_that_nobody_else_holds_are_freed() -> None:
    attention = Attention()
    weights = [ref(parameter) for parameter in attention.parameters()]
    prepack(attention)
    assert [weight() for weight in weights] == [None] * len(weights)


def test_tied_weights_stay_where_they_are_read_otherwise() -> None:
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


def test_experts_are_replaced_where_they_are_linear_layers() -> None:
    experts = torch.nn.ModuleList(
        torch.nn.ModuleDict({"gate_proj": linear(24, 16), "up_proj": linear(24, 16)})
        for _ in range(2)
    )
    prepack(experts)
    assert names(experts, SharedInputPart) == {
        f"{i}.{name}" for i in range(2) for name in ("gate_proj", "up_proj")
    }


@pytest.mark.parametrize("make_model", [qwen2, qwen3_moe])
def test_a_model_on_the_cpu_is_loaded_without_plain_linear_layers(make_model: object) -> None:
    assert callable(make_model)
    model = load(make_model).model
    assert not names(model, torch.nn.Linear)
    assert {"lm_head"} < names(model, PrepackedLinear)
    assert "model.layers.0.self_attn.q_proj" in names(model, SharedInputPart)


def test_the_bytes_of_all_layers_are_counted_once() -> None:
    attention = Attention()
    num_bytes = sum(parameter.nbytes for parameter in attention.parameters())
    prepack(attention)
    assert num_prepacked_bytes(attention) == num_bytes


def test_what_can_not_be_prepacked_stays_and_that_is_told(
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


def test_a_type_that_the_operators_do_not_know_stays() -> None:
    layer = torch.nn.Sequential(linear(24, 40, dtype=torch.float64))
    prepack(layer)
    assert names(layer, torch.nn.Linear) == {"0"}
