"""Byte-level BPE: every text has tokens, none of them unknown."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def train_byte_level_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    special_tokens: Sequence[str],
    add_prefix_space: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """Train on texts; the same texts in the same order give the same tokenizer.

    Args:
        texts: The training texts.
        vocab_size: Total number of tokens, including bytes and special tokens.
        special_tokens: Special tokens, which get the first ids in this order.
        add_prefix_space: Whether a text's first word is encoded like any other word.
        normalizer: Changes every text before it is split into words.
    """
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
