"""The shape of pydoc-detector: a tiny RoBERTa, and a byte-level BPE that folds marks of format.

The tokenizer normalises what would reveal an author without being words: line breaks and runs of
blanks, control characters, typographic quotes and dashes, asterisks and backticks.
"""

from collections.abc import Iterable
from typing import Final

from tokenizers import Regex, normalizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from models.training.byte_level_bpe import train_byte_level_bpe
from models.training.detector.document import Label

VOCAB_SIZE: Final = 4096
MAX_TOKENS: Final = 1280
"""300 characters have at most 1,200 bytes, each one token at worst; two tokens are added."""
BOS, PAD, EOS, MASK = "<s>", "<pad>", "</s>", "<mask>"
SPECIAL_TOKENS: Final = (BOS, PAD, EOS, MASK)
LABELS: Final = tuple(Label)

_FOLDED: Final = (
    ("[\u2018\u2019]", "'"),
    ("[\u201c\u201d]", '"'),
    ("[\u2013\u2014]", "-"),
    ("\u2026", "..."),
    ("[*`]+", ""),
    (r"[\s\p{Cc}\ufffd]+", " "),
)
NORMALIZER: Final = normalizers.Sequence(
    [
        *(normalizers.Replace(Regex(pattern), plain) for pattern, plain in _FOLDED),
        normalizers.Strip(),
    ]
)


def normalised(text: str) -> str:
    """Return a text as the tokenizer reads it."""
    folded: str = NORMALIZER.normalize_str(text)
    return folded


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on texts; the same texts in the same order give the same tokenizer."""
    tokenizer = train_byte_level_bpe(
        texts,
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        add_prefix_space=True,
        normalizer=NORMALIZER,
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        (EOS, SPECIAL_TOKENS.index(EOS)), (BOS, SPECIAL_TOKENS.index(BOS))
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # left untyped
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        cls_token=BOS,
        sep_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> RobertaConfig:
    """Describe the model for this tokenizer's vocabulary."""
    pad_token_id = tokenizer.pad_token_id
    assert isinstance(pad_token_id, int)
    return RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        # RoBERTa counts positions from the padding's id + 1.
        max_position_embeddings=MAX_TOKENS + pad_token_id + 1,
        type_vocab_size=1,
        pad_token_id=pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        id2label=dict(enumerate(map(str, LABELS))),
        label2id={str(label): index for index, label in enumerate(LABELS)},
        problem_type="single_label_classification",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> RobertaForSequenceClassification:
    """Make a model with fresh weights from torch's global generator, in float32."""
    return RobertaForSequenceClassification(build_config(tokenizer))
