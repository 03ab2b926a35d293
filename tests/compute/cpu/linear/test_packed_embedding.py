from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)

from deployments.compute.cpu.linear import packed_embedding
from deployments.compute.cpu.linear.packed_embedding import PackedEmbedding, is_tied
from deployments.compute.cpu.linear.packed_layout import can_read
from deployments.compute.cpu.linear.prepack import num_weight_bytes
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear, can_prepack
from deployments.engine.model.loader import prepare_model

SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

TOKEN_IDS = torch.tensor([[0, 63, 64, 200, 319, 64]])


def qwen2(vocab_size: int = 320, *, is_tied: bool = True) -> PreTrainedModel:
    config = Qwen2Config(**SIZES, vocab_size=vocab_size, tie_word_embeddings=is_tied)
    return Qwen2ForCausalLM(config)


def gemma3() -> PreTrainedModel:
    """Its embedding multiplies what it looks up by the root of the width."""
    config = Gemma3TextConfig(**SIZES, head_dim=16, vocab_size=320, tie_word_embeddings=True)
    return Gemma3ForCausalLM(config)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(packed_embedding, "MIN_TABLE_BYTES", 0)
    chosen: torch.dtype = request.param
    table = torch.rand(320, 64).to(chosen)
    packed = PrepackedLinear(table, None) if can_prepack(chosen) else None
    if packed is None or not can_read(packed.packed):
        pytest.skip("oneDNN packs weights in another layout here")
    return chosen


def embedded(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model.get_input_embeddings()(TOKEN_IDS)
    return found


def made(make_model: Callable[[], PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make_model()
    torch.nn.Module.to(model, dtype)  # transformers wraps its own, which has no such type
    return model


@pytest.mark.parametrize("make_model", [qwen2, gemma3])
def test_tied_weights_are_there_once_and_give_the_same_embeddings(
    make_model: Callable[[], PreTrainedModel], dtype: torch.dtype
) -> None:
    model = made(make_model, dtype)
    expected, num_bytes = embedded(model), num_weight_bytes(model)
    prepare_model(model)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert torch.equal(embedded(model), expected)
    assert num_weight_bytes(model) == num_bytes
    assert model.dtype is dtype


def test_a_vocabulary_that_needs_padding_keeps_its_embedding(dtype: torch.dtype) -> None:
    model = made(lambda: qwen2(330), dtype)
    expected, num_bytes = embedded(model), num_weight_bytes(model)
    prepare_model(model)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    assert torch.equal(embedded(model), expected)
    assert num_weight_bytes(model) == num_bytes + 330 * 64 * dtype.itemsize


def test_a_small_table_stays(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_embedding, "MIN_TABLE_BYTES", 320 * 64 * dtype.itemsize + 1)
    model = made(qwen2, dtype)
    prepare_model(model)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding


def test_a_table_that_the_model_reads_itself_stays(dtype: torch.dtype) -> None:
    class Reader(Qwen2Model):  # type: ignore[no-untyped-call] # left untyped
        def forward(self, *args: Any, **options: Any) -> Any:
            assert self.embed_tokens.weight.shape == (320, 64)
            return super().forward(*args, **options)

    model = made(qwen2, dtype)
    model.model.__class__ = Reader
    prepare_model(model)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding


def test_a_table_that_is_not_tied_stays(dtype: torch.dtype) -> None:
    model = made(lambda: qwen2(is_tied=False), dtype)
    assert not is_tied(model)
    prepare_model(model)
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
