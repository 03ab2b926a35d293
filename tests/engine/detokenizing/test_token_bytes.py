from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deployments.contract.output import TokenLogprob, TokenLogprobs
from deployments.engine.detokenizing.token_bytes import TokenBytes
from deployments.engine.sampling.logprobs import PositionLogprobs
from tests.engine.detokenizing.test_detokenizer import byte_fallback_tokenizer
from tests.engine.faults import CLIENTS_TEXT
from tests.engine.tiny_models import byte_tokenizer
from tests.failing import failing

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
BYTE_LEVEL = TokenBytes(byte_tokenizer())


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call] # transformers leaves it untyped


def joined(token_bytes: TokenBytes, token_ids: Sequence[int]) -> bytes:
    return b"".join(token_bytes.of(token_id) for token_id in token_ids)


@given(TEXTS)
def test_the_bytes_of_byte_level_tokens_make_the_text(text: str) -> None:
    token_ids = byte_tokenizer().encode(text, add_special_tokens=False)
    assert joined(BYTE_LEVEL, token_ids) == text.encode()


def test_every_byte_has_a_token() -> None:
    assert {BYTE_LEVEL.of(i) for i in range(44, 300)} == {bytes([byte]) for byte in range(256)}


def test_sentencepiece_writes_bytes_and_spaces_in_its_own_way() -> None:
    token_bytes = TokenBytes(fast(byte_fallback_tokenizer()))
    assert joined(token_bytes, [256, 257, 0xF0, 0x9F]) == b" Hello world\xf0\x9f"
    assert token_bytes.of(265) == "👍".encode()


def test_the_bytes_of_other_tokenizers_are_the_decoded_text() -> None:
    tokenizer = Tokenizer(models.WordPiece({"un": 0, "##able": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert TokenBytes(fast(tokenizer)).of(0) == b"un"


def test_special_tokens_give_their_name_and_unknown_ids_nothing() -> None:
    assert BYTE_LEVEL.of(1) == b"<eos>"
    assert BYTE_LEVEL.of(5000) == b""


def test_an_id_on_which_the_tokenizer_raises_has_no_bytes_and_is_logged_without_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer()

    monkeypatch.setattr(tokenizer, "convert_ids_to_tokens", failing(IndexError(CLIENTS_TEXT)))
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes.of(i) for i in (300, 300, 1)] == [b"", b"", b"<eos>"]
    assert [record.message for record in caplog.records] == ["token 300 has no bytes: IndexError"]


def test_part_of_a_character_gives_its_exact_bytes_and_a_replacement_character() -> None:
    first, *_ = byte_tokenizer().encode("é", add_special_tokens=False)
    [entry] = BYTE_LEVEL.describe(first, PositionLogprobs(-0.5, ((first, -0.5), (1, -2.0))))
    assert entry == TokenLogprobs(
        TokenLogprob(first, b"\xc3", -0.5),
        (TokenLogprob(first, b"\xc3", -0.5), TokenLogprob(1, b"<eos>", -2.0)),
    )
    assert entry.chosen.text == "\ufffd"
    assert BYTE_LEVEL.describe(first, None) == ()
