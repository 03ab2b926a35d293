import mmap
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from deployments.compute.cpu.linear.packed_embedding import MIN_TABLE_BYTES
from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle
from deployments.compute.cpu.linear.weight_memory import WeightMemory, fill_weights, weight_memory
from deployments.engine.model.loader import prepare_model


def model(quantization: str | None = None, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a prepared model whose layers are large enough to give back."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    made = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **changes}))
    prepare_model(made, quantization)
    return made


def inner_pages(weight: WeightMemory) -> torch.Tensor:
    """Return what lies on pages that the weight has for itself."""
    return weight._bytes()[mmap.PAGESIZE : -mmap.PAGESIZE]


def contents(held: PreTrainedModel) -> list[bytes]:
    return [each._bytes().numpy().tobytes() for each in weight_memory(held)]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@torch.inference_mode()
def test_weights_that_were_given_back_are_filled_again_in_place(quantization: str | None) -> None:
    if quantization is not None and (obstacle := quantization_obstacle()):
        pytest.skip(obstacle)
    held, rows = model(quantization), torch.ones(3, 256)
    layer = held.get_submodule("model.layers.1.mlp")
    expected, before, where = layer(rows), contents(held), weight_memory(held)
    for each in where:
        each.give_back()
    assert not any(inner_pages(each).any() for each in where)
    fill_weights(where, model(quantization))
    assert weight_memory(held) == where
    assert contents(held) == before
    assert torch.equal(layer(rows), expected)


def test_a_table_that_is_looked_up_in_the_packed_layer_is_there_once() -> None:
    tied = model(vocab_size=MIN_TABLE_BYTES // 1024, tie_word_embeddings=True)
    where = weight_memory(tied)
    assert len({each.address for each in where}) == len(where)
    assert sum(each.num_bytes >= MIN_TABLE_BYTES for each in where) == 1


def test_the_copy_gives_its_memory_back() -> None:
    held, other = model(), model()
    fill_weights(weight_memory(held), other)
    assert not any(inner_pages(each).any() for each in weight_memory(other))


def test_another_model_fills_nothing() -> None:
    held = model()
    before, where = contents(held), weight_memory(held)
    with pytest.raises(ValueError, match=re.escape("bytes where")):
        fill_weights(where, model(seed=1, intermediate_size=384))
    assert contents(held) == before
