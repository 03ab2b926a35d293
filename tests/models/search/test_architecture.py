from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.training.search.architecture import (
    MATRYOSHKA_DIMENSIONS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    NUM_SINKS,
    build_model,
    token_weights,
    train_tokenizer,
)

TEXTS = ["the split of the text", "the join of the paths", "the rest", "the OrderedDict"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TEXTS)


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("collections.OrderedDict", "collections ordered dict"),
        ("str.split(sep=None)", "str split sep=none"),
        ("na\u00efve  caf\u00e9!", "naive cafe"),
        ("snake_case, really?", "snake case really"),
    ],
)
def test_what_does_not_matter_to_a_search_is_folded(tokenizer: Any, text: str, folded: str) -> None:
    assert tokenizer(text)["input_ids"] == tokenizer(folded)["input_ids"]


@given(text=st.text())
def test_no_text_is_unknown(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.unk_token_id not in token_ids


def test_rare_tokens_weigh_more_and_all_weights_are_bounded(tokenizer: Any) -> None:
    weights = token_weights(tokenizer, TEXTS)
    the, of, split = (
        weights[tokenizer(word, add_special_tokens=False)["input_ids"][0]]
        for word in ("the", "of", "split")
    )
    assert MIN_WEIGHT == the < of < split <= MAX_WEIGHT


def test_a_fresh_model_is_a_bag_of_words_weighted_by_their_rarity(tokenizer: Any) -> None:
    torch.manual_seed(0)
    model: Any = build_model(tokenizer, TEXTS)
    model.eval()
    weights = token_weights(tokenizer, TEXTS)
    token_ids = tokenizer("the split", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        (hidden,) = model(token_ids).last_hidden_state
        (other,) = model(token_ids.flip(1)).last_hidden_state
    torch.testing.assert_close(hidden, other.flip(0))
    assert (hidden[:, -NUM_SINKS:] == 0).all()
    whole = model.config.hidden_size**0.5
    torch.testing.assert_close(hidden.norm(dim=1) / whole, weights[token_ids[0]], atol=0.02, rtol=0)


def test_the_configuration_tells_where_vectors_may_be_cut(tokenizer: Any) -> None:
    model: Any = build_model(tokenizer, TEXTS)
    assert tuple(model.config.matryoshka_dimensions) == MATRYOSHKA_DIMENSIONS
    assert MATRYOSHKA_DIMENSIONS[-1] == model.config.hidden_size
