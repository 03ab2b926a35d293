"""The byte-level BPE tokenizer of pydoc-chat, trained on its own corpus.

Special tokens have Gemma 3's names. The tokenizer adds none to a text: the chat template writes
``<bos>``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

from models.training.byte_level_bpe import train_byte_level_bpe

VOCAB_SIZE: Final = 4096
PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
START_OF_TURN, END_OF_TURN = "<start_of_turn>", "<end_of_turn>"
START_OF_IMAGE, END_OF_IMAGE = "<start_of_image>", "<end_of_image>"
IMAGE_SOFT_TOKEN = "<image_soft_token>"
SPECIAL_TOKENS: Final = (
    PAD,
    EOS,
    BOS,
    START_OF_TURN,
    END_OF_TURN,
    START_OF_IMAGE,
    END_OF_IMAGE,
    IMAGE_SOFT_TOKEN,
)
CHAT_TEMPLATE_PATH = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on texts; the same texts in the same order give the same tokenizer."""
    tokenizer = train_byte_level_bpe(texts, vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # left untyped
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "boi_token": START_OF_IMAGE,
            "eoi_token": END_OF_IMAGE,
            "image_token": IMAGE_SOFT_TOKEN,
        },
        chat_template=CHAT_TEMPLATE_PATH.read_text(encoding="utf-8"),
    )
