from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    PoolingFailedError,
    RaystreamError,
)
from deployments.contract.pooling import PoolingInput, PoolingRequest, TextPair
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
from tests.engine.tiny_models import byte_tokenizer
from tests.pooling.tiny_folder import framing_tokenizer

BEGIN, END = 2, 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return framing_tokenizer()


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    return TextEncoder(tokenizer, 8)


def ask(*texts: str, truncate: bool = False, max_num_tokens: int | None = None) -> PoolingRequest:
    return PoolingRequest("r", texts, truncate, max_num_tokens)


def plain(text: str) -> tuple[int, ...]:
    return tuple(byte_tokenizer().encode(text, add_special_tokens=False))


def test_requests_get_their_own_texts_back(encoder: TextEncoder) -> None:
    first, second = encoder.encode([ask("ab", "c"), ask("")])
    assert isinstance(first, EncodedTexts)
    assert first.token_ids == ((BEGIN, *plain("ab"), END), (BEGIN, *plain("c"), END))
    assert first.are_truncated == (False, False)
    assert isinstance(second, EncodedTexts)
    assert second.token_ids == ((BEGIN, END),)


def test_a_text_that_is_too_long_is_an_error_that_names_it_and_its_length(
    encoder: TextEncoder,
) -> None:
    fits, refused = encoder.encode([ask("abcdef"), ask("x", "abcdefg")])
    assert isinstance(fits, EncodedTexts)
    assert isinstance(refused, ContextLengthExceededError)
    assert refused.param == "input[1]"
    for words in ("has 9 tokens", "reads 8"):
        assert words in refused.message


def test_truncation_drops_a_text_s_end_and_keeps_its_special_tokens(encoder: TextEncoder) -> None:
    (found,) = encoder.encode([ask("x", "abcdefghij", truncate=True)])
    assert isinstance(found, EncodedTexts)
    assert found.token_ids == ((BEGIN, *plain("x"), END), (BEGIN, *plain("abcdef"), END))
    assert found.are_truncated == (False, True)
    (again,) = encoder.encode([ask("abcdefghij")])
    assert isinstance(again, RaystreamError), "truncation holds for one request only"


def test_a_text_may_be_truncated_to_fewer_tokens_than_the_model_reads(encoder: TextEncoder) -> None:
    one, other = encoder.encode(
        [ask("x", "abcdef", truncate=True, max_num_tokens=5), ask("abcdef", truncate=True)]
    )
    assert isinstance(one, EncodedTexts)
    assert one.token_ids == ((BEGIN, *plain("x"), END), (BEGIN, *plain("abc"), END))
    assert one.are_truncated == (False, True)
    assert isinstance(other, EncodedTexts)
    assert other.are_truncated == (False,)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_length_too_short_for_any_text_or_beyond_the_model_s_is_refused(
    encoder: TextEncoder, length: int
) -> None:
    refused, fits = encoder.encode(
        [ask("ab", truncate=True, max_num_tokens=length), ask("ab", truncate=True)]
    )
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "truncate_prompt_tokens"
    assert "from 3 to 8" in refused.message
    assert isinstance(fits, EncodedTexts), "a length holds for one request only"


def test_a_text_that_spells_a_special_token_stays_text(encoder: TextEncoder) -> None:
    (found,) = encoder.encode([ask("<eos>")])
    assert isinstance(found, EncodedTexts)
    assert found.token_ids == ((BEGIN, *map(ord_id, "<eos>"), END),)


def ord_id(letter: str) -> int:
    (token_id,) = plain(letter)
    return token_id


@pytest.mark.parametrize(
    ("bad", "says"), [(ask("fine", "\ud800"), "The text is not valid"), (ask(), "no text")]
)
def test_an_invalid_request_fails_by_itself(
    encoder: TextEncoder, bad: PoolingRequest, says: str
) -> None:
    before, refused, after = encoder.encode([ask("a"), bad, ask("b")])
    assert isinstance(refused, InvalidRequestError)
    assert says in refused.message
    assert isinstance(before, EncodedTexts)
    assert isinstance(after, EncodedTexts)
    assert after.token_ids == ((BEGIN, *plain("b"), END),)


def test_a_text_that_the_tokenizer_fails_on_fails_only_its_own_request(
    encoder: TextEncoder,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stock = type(tokenizer).__call__

    def fail_on_evil(self: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> Any:
        if any("evil" in text for text in texts):
            raise OverflowError(f"can't take {texts}")
        return stock(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", fail_on_evil)
    before, refused, after = encoder.encode([ask("a"), ask("fine", "evil"), ask("b", "c")])
    assert isinstance(before, EncodedTexts)
    assert isinstance(refused, PoolingFailedError)
    assert refused.param == "input[1]"
    assert isinstance(after, EncodedTexts)
    assert after.token_ids == ((BEGIN, *plain("b"), END), (BEGIN, *plain("c"), END))
    assert "OverflowError" in caplog.text
    assert "evil" not in refused.message + caplog.text


def test_a_text_without_tokens_is_refused_where_the_model_adds_none() -> None:
    (refused,) = TextEncoder(byte_tokenizer(), 8).encode([ask("a", "")])
    assert isinstance(refused, InvalidRequestError)
    assert "The text has no tokens" in refused.message
    assert refused.param == "input[1]"


def pooling(*texts: PoolingInput, **options: Any) -> PoolingRequest:
    return PoolingRequest("r", texts, **options)


def test_token_ids_are_taken_as_they_are(encoder: TextEncoder) -> None:
    (found,) = encoder.encode([pooling((7, 8), "a")])
    assert isinstance(found, EncodedTexts)
    assert found.token_ids == ((7, 8), (BEGIN, *plain("a"), END))


def test_token_ids_that_the_model_does_not_know_are_refused(encoder: TextEncoder) -> None:
    (refused,) = encoder.encode([pooling((7,), (1, 10**6))])
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "input[1]"
    assert "Token ids are from 0 to" in refused.message


def test_too_many_token_ids_are_refused_or_lose_their_end(encoder: TextEncoder) -> None:
    refused, cut = encoder.encode([pooling((5,) * 9), pooling((*range(5, 14),), truncate=True)])
    assert isinstance(refused, ContextLengthExceededError)
    assert isinstance(cut, EncodedTexts)
    assert cut.token_ids == (tuple(range(5, 13)),)
    assert cut.are_truncated == (True,)


WORD = st.text("abc", min_size=1, max_size=4)


@given(
    st.lists(
        st.one_of(
            st.text("abc", max_size=4),
            st.builds(TextPair, WORD, WORD),
            st.tuples(st.integers(0, 99), st.integers(0, 99)),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 7),
)
def test_texts_of_all_kinds_keep_their_places(
    tokenizer: PreTrainedTokenizerBase, texts: list[PoolingInput], num_first: int
) -> None:
    encoder = TextEncoder(tokenizer, 32)
    first, others = texts[:num_first], texts[num_first:]
    together = encoder.encode([pooling(*first), *([pooling(*others)] if others else [])])
    alone = [encoder.encode([pooling(text)])[0] for text in texts]
    rows = [ids for each in together if isinstance(each, EncodedTexts) for ids in each.token_ids]
    assert rows == [each.token_ids[0] for each in alone if isinstance(each, EncodedTexts)]
    assert len(rows) == len(texts)


def test_token_ids_may_be_truncated_to_one(encoder: TextEncoder) -> None:
    found, refused = encoder.encode(
        [pooling((5, 6), truncate=True, max_num_tokens=num) for num in (1, 9)]
    )
    assert isinstance(found, EncodedTexts)
    assert found.token_ids == ((5,),)
    assert isinstance(refused, InvalidRequestError)
    assert "choose from 1 to 8" in refused.message


def test_the_first_texts_may_be_left_whole(encoder: TextEncoder) -> None:
    (found,) = encoder.encode([pooling("abcdef", "abcdef", max_text_tokens=3, num_whole=1)])
    assert isinstance(found, EncodedTexts)
    assert found.token_ids == ((BEGIN, *plain("abcdef"), END), (BEGIN, *plain("abc"), END))


def test_a_text_s_own_tokens_may_be_bounded(encoder: TextEncoder) -> None:
    (found,) = encoder.encode([pooling("abcdef", "ab", max_text_tokens=3)])
    assert isinstance(found, EncodedTexts)
    assert found.token_ids == ((BEGIN, *plain("abc"), END), (BEGIN, *plain("ab"), END))
    assert found.are_truncated == (True, False)
