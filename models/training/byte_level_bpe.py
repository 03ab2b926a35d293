"""Byte-level BPE: every text has tokens, and none is unknown."""

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
        texts: What it is to encode in few tokens.
        vocab_size: Tokens in all, those of the bytes and special ones among them.
        special_tokens: Get the first ids, in this order.
        add_prefix_space: Whether a text's first word is written as any other.
        normalizer: Changes every text before it is cut.
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
