import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

from deployments.compute import tokenizer_files
from deployments.compute.tokenizer_files import SAMPLES, load_tokenizer, require_embeddings
from deployments.contract.unsupported_model import UnsupportedModelError
from tests.engine.tiny_models import byte_tokenizer
from tests.pooling.tiny_folder import framing_tokenizer

LLAMA: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
GEMMA: dict[str, Any] = LLAMA | {
    "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
}  # fmt: skip
LLAMA_S_CLASS = {"tokenizer_class": "LlamaTokenizer"}
FOX = "the quick brown fox"


def save(folder: Path, family: str, file: str = "tokenizer.model", **options: Any) -> Path:
    """Save a trained SentencePiece model as the only file of a tokenizer."""
    lines = (f"{FOX} {i} jumps over the lazy dog, said Größe" for i in range(100))
    written = BytesIO()
    given: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 320,
        "hard_vocab_limit": False,
    } | options
    SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=written, minloglevel=2, **given
    )
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(written.getvalue())
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return folder


def settings(folder: Path, **values: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def test_a_sentencepiece_model_alone_makes_the_tokens_that_it_was_trained_for(
    tmp_path: Path,
) -> None:
    folders = {
        "old Llama": settings(save(tmp_path / "a", "llama", **LLAMA), **LLAMA_S_CLASS),
        "without settings": save(tmp_path / "b", "llama", **LLAMA),
        "normalized": save(tmp_path / "c", "llama", byte_fallback=True),
        "Mistral": settings(save(tmp_path / "d", "mistral", **LLAMA), **LLAMA_S_CLASS),
        "Phi-3": save(tmp_path / "e", "phi3", **LLAMA),
        "Gemma": save(tmp_path / "f", "gemma", **GEMMA),
        "XLM-R": save(
            tmp_path / "g", "xlm-roberta", "sentencepiece.bpe.model", model_type="unigram",
            vocab_size=60,
        ),
    }  # fmt: skip
    for family, folder in folders.items():
        tokenizer = load_tokenizer(str(folder), revision=None)
        reference = SentencePieceProcessor(model_file=str(next(folder.glob("*.model"))))
        unknown = reference.id_to_piece(reference.unk_id())
        for text in (*SAMPLES, FOX, f"  {FOX} ", "\ttab\r\nline"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            pieces = tokenizer.convert_ids_to_tokens(ids)
            assert pieces == [reference.id_to_piece(i) for i in reference.encode(text)], family
            if unknown not in pieces:
                assert tokenizer.decode(ids) == reference.decode(reference.encode(text)), family
        assert tokenizer(FOX)["input_ids"][0] == tokenizer.convert_tokens_to_ids(
            tokenizer.bos_token
        ), family


def test_a_text_begins_with_the_bos_token_unless_the_files_say_otherwise(tmp_path: Path) -> None:
    folder = settings(save(tmp_path, "llama", **LLAMA), add_bos_token=False)
    tokenizer = load_tokenizer(str(folder), revision=None)
    assert tokenizer.bos_token_id not in tokenizer(FOX)["input_ids"]


def test_a_text_after_a_special_token_is_divided_as_a_text_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save(tmp_path, "llama", **LLAMA)), revision=None)
    assert tokenizer.tokenize(f"<s>{FOX}") == ["<s>", *tokenizer.tokenize(FOX)]


def test_a_tokenizer_json_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, "llama", **LLAMA)
    LlamaTokenizer.from_pretrained(folder).save_pretrained(folder)
    monkeypatch.delattr(tokenizer_files, "_agrees")
    assert isinstance(load_tokenizer(str(folder), revision=None), LlamaTokenizer)


def test_a_tokenizer_that_differs_from_sentencepiece_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, "llama", **LLAMA)
    monkeypatch.setattr(tokenizer_files, "_mend", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"otherwise than .* add a tokenizer\.json"):
        load_tokenizer(str(folder), revision=None)


def test_a_tokenizer_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    assert isinstance(GemmaTokenizer.from_pretrained(tmp_path), GemmaTokenizer)
    with pytest.raises(UnsupportedModelError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path), revision=None)


def with_tokens(*names: str, special: bool) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.add_tokens(list(names), special_tokens=special)
    return tokenizer


def test_tokens_without_an_embedding_are_refused_by_name() -> None:
    tokenizer = with_tokens("fox", "dog", special=False)
    size = len(tokenizer)
    require_embeddings(tokenizer, size)
    for num, told in ((1, r"1 token\(s\).*'dog' with id"), (2, r"2 token\(s\).*'fox' with id")):
        with pytest.raises(UnsupportedModelError, match=told):
            require_embeddings(tokenizer, size - num)


def test_special_tokens_without_an_embedding_are_refused_where_prompts_get_them() -> None:
    tokenizer = with_tokens("<image>", special=True)
    size = len(tokenizer) - 1
    require_embeddings(tokenizer, size, ["<special1>user\nA fox<special2>"])
    with pytest.raises(UnsupportedModelError, match="'<image>' with id"):
        require_embeddings(tokenizer, size, ["<special1>user\n<image>"])
    framing = framing_tokenizer()  # it puts the tokens 2 and 3 around each text
    with pytest.raises(UnsupportedModelError, match="no embedding"):
        require_embeddings(framing, 3)
