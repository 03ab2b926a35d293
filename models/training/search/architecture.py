"""The shape of pydoc-search: a BERT of one layer that begins as a weighted bag of words.

The tokenizer folds what does not matter to a search: case, accents, punctuation; ``OrderedDict``
and ``os.path`` are two words each. BERT normalises every token's vector to the same length, so
that in a mean all tokens would count alike, "the" as much as "gzip". Hence the sinks: a few
channels that take the part of a vector's length that must not count, and that the last norm
multiplies by zero. In fresh weights they leave each token its rarity (inverse document
frequency) as its weight, and the layer adds nothing yet; both are trained on.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from tokenizers import Regex, normalizers, processors
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from models.training.byte_level_bpe import train_byte_level_bpe

VOCAB_SIZE: Final = 6144
MAX_TOKENS: Final = 128
HIDDEN: Final = 192
MATRYOSHKA_DIMENSIONS: Final = (32, 64, 96, HIDDEN)
NUM_SINKS: Final = 8
"""Half of them are positive and half negative, because the norms subtract the mean."""
MIN_WEIGHT: Final = 0.02
MAX_WEIGHT: Final = 0.98
INITIAL_STD: Final = 0.2
PAD, CLS, SEP, UNK, MASK = "[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"
SPECIAL_TOKENS: Final = (PAD, CLS, SEP, UNK, MASK)
NORMALIZER: Final = normalizers.Sequence(
    [
        normalizers.Replace(Regex(r"(?<=[a-z0-9])(?=[A-Z])"), " "),
        normalizers.NFKD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[^\p{L}\p{N}+*/%<>=&|^~@]+"), " "),
        normalizers.Strip(),
    ]
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on texts; the same texts in the same order give the same tokenizer."""
    tokenizer = train_byte_level_bpe(
        texts,
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        add_prefix_space=True,
        normalizer=NORMALIZER,
    )
    tokenizer.post_processor = processors.BertProcessing(
        (SEP, SPECIAL_TOKENS.index(SEP)), (CLS, SPECIAL_TOKENS.index(CLS))
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # left untyped
        tokenizer_object=tokenizer,
        pad_token=PAD,
        cls_token=CLS,
        sep_token=SEP,
        unk_token=UNK,
        mask_token=MASK,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> BertConfig:
    """Describe the model for this tokenizer's vocabulary."""
    # vLLM's name for the lengths to which a vector may be cut; no field of BERT's own.
    matryoshka: dict[str, Any] = {"matryoshka_dimensions": list(MATRYOSHKA_DIMENSIONS)}
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=3,
        max_position_embeddings=MAX_TOKENS,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        **matryoshka,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> BertModel:
    """Make a model with fresh weights from torch's global generator, in float32.

    Args:
        tokenizer: Its tokenizer.
        texts: Texts in which the tokens' rarity is counted.
    """
    model: Any = BertModel(build_config(tokenizer), add_pooling_layer=False)
    layer = model.encoder.layer[0]
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.copy_(_words(token_weights(tokenizer, texts)))
        for zero in (
            model.embeddings.position_embeddings,
            model.embeddings.token_type_embeddings,
            layer.attention.output.dense,
            layer.output.dense,
        ):
            zero.weight.zero_()
        layer.output.LayerNorm.weight[-NUM_SINKS:] = 0
    assert isinstance(model, BertModel)
    return model


def with_pooler(model: BertModel) -> BertModel:
    """Return the model with BERT's own pooler of zeros.

    The vectors do not need it, but loaders that know only BERT expect its weights in the file.
    """
    complete: Any = BertModel(model.config)
    complete.load_state_dict(model.state_dict(), strict=False)
    for parameter in complete.pooler.parameters():
        torch.nn.init.zeros_(parameter)
    assert isinstance(complete, BertModel)
    return complete


def token_weights(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Return each token's rarity as a weight between 0 and 1: [vocabulary], float32."""
    counts: Counter[int] = Counter()
    for token_ids in tokenizer(list(texts))["input_ids"]:
        counts.update(set(token_ids))
    rarity = [math.log(len(texts) / (1 + counts[index])) for index in range(len(tokenizer))]
    return (torch.tensor(rarity) / max(rarity)).clamp(MIN_WEIGHT, MAX_WEIGHT)


def _words(weights: Tensor) -> Tensor:
    """Draw vectors that have these lengths outside of the sinks after a norm."""
    words = torch.randn(len(weights), HIDDEN)
    words[:, -NUM_SINKS:] = 0
    in_sinks = words.norm(dim=1) * (1 / weights.square() - 1).sqrt() / math.sqrt(NUM_SINKS)
    half = NUM_SINKS // 2
    words[:, -NUM_SINKS:-half] = in_sinks[:, None]
    words[:, -half:] = -in_sinks[:, None]
    return words * INITIAL_STD
