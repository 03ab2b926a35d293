from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training.detector.architecture import MAX_TOKENS, normalised, train_tokenizer
from models.training.detector.pieces import MAX_CHARS


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["Return the number of items.", "Join two or more components."] * 5)


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("two\n   lines\t", "two lines"),
        ("\u201cquoted\u201d \u2018so\u2019\u2014or\u2026", "\"quoted\" 'so'-or..."),
        ("*args*, ``None``", "args, None"),
        ("a\x00b\x1fc\ufffdd", "a b c d"),
        ("\u00e9\u4e2d\U0001f600", "\u00e9\u4e2d\U0001f600"),
    ],
)
def test_marks_of_format_are_folded(text: str, folded: str) -> None:
    assert normalised(text) == folded


@given(text=st.text())
def test_folding_twice_is_folding_once(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


@given(text=st.text(max_size=MAX_CHARS))
def test_no_piece_is_too_long_for_the_model(tokenizer: Any, text: str) -> None:
    assert len(tokenizer(text)["input_ids"]) <= MAX_TOKENS


def test_the_longest_piece_fits(tokenizer: Any) -> None:
    emoji = "\U0001f600" * MAX_CHARS
    assert len(tokenizer(emoji)["input_ids"]) <= MAX_TOKENS


@given(text=st.text())
def test_no_text_is_unknown(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(token_ids).strip() == normalised(text).strip()
