"""Loads a model's tokenizer and refuses one that would make wrong tokens.

A folder may hold its tokenizer only as a SentencePiece model (`tokenizer.model`), as older models
do. transformers converts it, but for some families it drops the space that SentencePiece puts
before a text: another tokenization than in training, without an error. So the converted tokenizer
is compared with SentencePiece itself.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Regex, decoders, normalizers
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.checkpoint import find_file

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

SPACE: Final = "\u2581"
"""What SentencePiece writes for a space."""

PLAIN_CLASSES: Final = (LlamaTokenizer, PreTrainedTokenizerFast)
"""Classes that add nothing to what a SentencePiece model says; others may lower the case."""

BEGINNING_CLASSES: Final = (*PLAIN_CLASSES, GemmaTokenizer)
"""Classes whose texts begin with the bos token, unless the files say that they don't."""

SAMPLES: Final = (
    "The quick brown fox jumps over 13 lazy dogs.",
    " a space before, and two  between",
    "x = {\n    'key': [1, 2.5],\n}\n",
    "Größe, naïve, 東京, 🙂",
    "a",
)
"""Texts without the names of special tokens, which a tokenizer treats otherwise by design."""


def load_tokenizer(source: str, *, revision: str | None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.

    Raises:
        UnsupportedModelError: There are no files, or transformers can't read them as they are
            meant.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **options)
    check_tokenizer(source, revision, tokenizer)
    return tokenizer


def check_tokenizer(source: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that was made without files, and fix one made from a SentencePiece model.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
        tokenizer: What transformers made of it.

    Raises:
        UnsupportedModelError: It knows only special tokens, or differs from SentencePiece.
    """
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UnsupportedModelError(f"can't load {source!r}: it has no tokenizer files")
    file = getattr(tokenizer, "vocab_file", None)
    if not str(file).endswith(".model") or find_file(
        source, revision, "tokenizer.json", local_only=True
    ):
        return  # transformers has loaded from it
    # Imported here, as below: only old models need it.
    from sentencepiece import SentencePieceProcessor

    try:
        reference = SentencePieceProcessor(model_file=str(file))
    except RuntimeError:  # a vocabulary of another kind, such as tiktoken's
        return
    if type(tokenizer) in PLAIN_CLASSES and not _agrees(tokenizer, reference):
        _mend(tokenizer, reference)
        if not _agrees(tokenizer, reference):
            raise UnsupportedModelError(
                f"can't load {source!r}: transformers reads its SentencePiece model otherwise than "
                "SentencePiece does; add a tokenizer.json, such as that of the model it is based on"
            )
    says_nothing = "add_bos_token" not in tokenizer.init_kwargs
    if type(tokenizer) in BEGINNING_CLASSES and tokenizer.bos_token and says_nothing:
        # transformers' own default, which is lost where it converts a file.
        tokenizer.add_bos_token = True


def _agrees(tokenizer: PreTrainedTokenizerBase, reference: "SentencePieceProcessor") -> bool:
    """Return whether a tokenizer divides texts into pieces as SentencePiece does."""
    unknown = reference.id_to_piece(reference.unk_id())
    for text in SAMPLES:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces: Sequence[str] = tokenizer.convert_ids_to_tokens(ids)
        own = [unknown if piece == tokenizer.unk_token else piece for piece in pieces]
        if own != [reference.id_to_piece(each) for each in reference.encode(text)]:
            return False
    return True


def _mend(tokenizer: PreTrainedTokenizerBase, reference: "SentencePieceProcessor") -> None:
    """Make a tokenizer prepare texts as the SentencePiece model says.

    Source: `NormalizerSpec` in
    https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
    """
    from sentencepiece import sentencepiece_model_pb2

    backend: Any = tokenizer.backend_tokenizer
    messages: Any = sentencepiece_model_pb2  # made by protobuf, which writes no types
    model = messages.ModelProto.FromString(reference.serialized_model_proto())
    prepares = model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if prepares.precompiled_charsmap:
        steps.append(normalizers.Precompiled(prepares.precompiled_charsmap))
    if prepares.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if prepares.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepares.add_dummy_prefix:
        parts.append(decoders.Strip(" ", left=1))
    backend.decoder = decoders.Sequence(parts)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the tokens that normal decoding leaves out of the text."""
    return set(tokenizer.all_special_tokens) | {
        str(added) for added in tokenizer.added_tokens_decoder.values() if added.special
    }


def require_embeddings(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, written: Iterable[str] = ()
) -> None:
    """Refuse a tokenizer that makes tokens which the model has no embeddings for.

    Special tokens that no prompt gets may be among them: published models have such ones.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: The number of tokens that the model has embeddings for.
        written: Texts with the special tokens that prompts get.

    Raises:
        UnsupportedModelError: Some prompts could not be computed; the message names a token.
    """
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= vocab_size}
    if not beyond:
        return
    used = {
        token_id
        for text in written
        for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]
    }
    used.update(tokenizer("")["input_ids"])
    special = special_tokens(tokenizer)
    refused = sorted((i, token) for token, i in beyond.items() if i in used or token not in special)
    if refused:
        token_id, token = refused[0]
        raise UnsupportedModelError(
            f"the tokenizer makes {len(refused)} token(s) that the model has no embedding for, "
            f"{token!r} with id {token_id} among them; the model has {vocab_size} embeddings: save "
            "it after transformers' resize_token_embeddings, or remove the tokens from the files"
        )
