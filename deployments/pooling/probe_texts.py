"""Random texts for trying out a model when it is loaded, and for checking that its device works.

They are random tokens between the special tokens that the tokenizer puts around every text. Some
models need those: the heads of BART and T5 look for the token that ends a text.
"""

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from deployments.pooling.packed_backbone import TextModel
from deployments.pooling.request_queue import TokenIds

SAMPLE = "a"
"""A text that shows which special tokens the tokenizer puts before and after it."""


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """Makes probe texts.

    Attributes:
        before: Special tokens that begin every text.
        after: Special tokens that end it.
        ordinary: All tokens that the model knows, except special ones.
    """

    before: TokenIds
    after: TokenIds
    ordinary: TokenIds

    @classmethod
    def of(cls, model: TextModel, tokenizer: PreTrainedTokenizerBase) -> "ProbeTexts":
        """Find out which special tokens surround a text, and which other tokens the model knows."""
        before, after = _frame(tokenizer)
        config = model.config.get_text_config()
        special = {*tokenizer.all_special_ids, *before, *after, config.pad_token_id}
        num_known = min(config.vocab_size, len(tokenizer))
        return cls(before, after, tuple(i for i in range(num_known) if i not in special))

    def of_length(self, length: int) -> TokenIds:
        """Return a text of `length` tokens, or the shortest possible text if that is longer."""
        num_ordinary = length - len(self.before) - len(self.after)
        if not (self.before or self.after):
            num_ordinary = max(1, num_ordinary)
        pick = random.Random(length)
        words = (pick.choice(self.ordinary) for _ in range(num_ordinary))
        return (*self.before, *words, *self.after)


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[TokenIds, TokenIds]:
    """Return the special tokens before a text and those after it."""
    bare = tuple(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"])
    framed = tuple(tokenizer(SAMPLE)["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        end = start + len(bare)
        if framed[start:end] == bare:
            return framed[:start], framed[end:]
    return (), ()
