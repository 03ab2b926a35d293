"""What the text of a sequence must be: a grammar, as a mask over the vocabulary.

llguidance does the work: a parser over bytes tells, before each token, which tokens may come next.
`GrammarCompiler` belongs to a model. `GrammarMatcher` follows one sequence and belongs to it, not
to a slot or a step, so it stays true when that moves or is computed again.

A grammar comes from a client, so what it may cost is bounded (`grammar_limits`). Where a bound is
met or the grammar leads into a dead end, the matcher's sequence ends with an error, alone.

llguidance is imported with the first grammar: an engine that meets none runs without it.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from collections.abc import Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deployments.engine.sampling_params import GRAMMAR_PARAM, InvalidParameterError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

BITS_PER_WORD = 32
UNCONSTRAINABLE = "this model's tokenizer can't be constrained by a grammar; ask for text"


class GrammarMatcher:
    """Which tokens may come next in one sequence.

    Attributes:
        error: Why the sequence can't go on; None while it can.
    """

    __slots__ = ("_bitmask", "_matcher", "error")

    def __init__(self, matcher: "LLMatcher", num_tokens: int) -> None:
        """Take a new matcher over a vocabulary of so many tokens."""
        self._matcher = matcher
        num_words = -(-num_tokens // BITS_PER_WORD)
        self._bitmask = torch.zeros(num_words, dtype=torch.int32)
        self.error: str | None = None
        self._note_error()

    def bitmask(self, barred_token_ids: Collection[int] = ()) -> torch.Tensor:
        """Return which tokens may come next; none at all if there is an error.

        Args:
            barred_token_ids: Tokens to leave out, unless the grammar allows no other.

        Returns:
            [words], int32, on the host: token i is bit i % 32 of word i // 32. It holds until the
            next call.
        """
        if self.error is None:
            mask = self._bitmask
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
            self._note_error()
        if self.error is not None:
            return self._bitmask.zero_()
        return _without(self._bitmask, barred_token_ids) if barred_token_ids else self._bitmask

    def advance(self, token_id: int) -> bool:
        """Take the sequence's next token; return whether the grammar allows nothing behind it."""
        self._matcher.consume_token(token_id)
        self._note_error()
        return self.error is None and self._matcher.is_stopped()

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            # One line, and not the parser's state, which may follow.
            self.error = self._matcher.get_error().partition("\n")[0]


class GrammarCompiler:
    """Makes matchers for one model; any thread may."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """Keep what a matcher needs; nothing is made of it before the first grammar comes.

        Args:
            tokenizer: The model's.
            vocab_size: How many logits the model gives.
            eos_token_ids: What may end a text that the grammar holds to be whole.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._lock = Lock()

    def compile(self, grammar: str, generated_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher that has followed the tokens.

        It takes from less than a millisecond to some hundred, and the first one up to a second.

        Raises:
            InvalidParameterError: The grammar is wrong, too large or allows no text, the tokens
                break it, or the tokenizer can't be constrained.
        """
        from llguidance import LLMatcher

        from deployments.engine.grammar_limits import parser_limits

        vocabulary = self._constrained_vocabulary()
        bare = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
        matcher = GrammarMatcher(bare, vocabulary.vocab_size)
        # Much of the work comes with the first mask; and without one nothing may begin.
        matcher.bitmask()
        if matcher.error is not None:
            raise _refusal(f"the grammar can't be used: {matcher.error}")
        for token_id in generated_token_ids:
            matcher.advance(token_id)
        if matcher.error is not None:
            raise _refusal(f"the generated tokens break the grammar: {matcher.error}")
        return matcher

    def _constrained_vocabulary(self) -> "LLTokenizer":
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _make_vocabulary(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise _refusal(UNCONSTRAINABLE)
        # Logits may be wider than the tokenizer, to be a round number, or narrower.
        num_tokens = max(self._vocab_size, len(self._tokenizer))
        try:
            return from_tokenizer(
                self._tokenizer, n_vocab=num_tokens, eos_token=self._eos_token_ids or None
            )
        except ValueError as error:
            raise _refusal(UNCONSTRAINABLE) from error


def unpack(bitmasks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which tokens may not come: [n, vocab], bool.

    Args:
        bitmasks: [n, words], int32, from `GrammarMatcher.bitmask`, on any device.
        vocab_size: How many logits a row has; no more than the bitmask has bits.
    """
    # As bytes, whose bits are in the order of the tokens where words are little-endian, as on all
    # machines that torch runs on.
    places = torch.arange(8, dtype=torch.uint8, device=bitmasks.device)
    bits = bitmasks.view(torch.uint8)[:, :, None] >> places & 1
    return (bits == 0).flatten(1)[:, :vocab_size]


def _without(bitmask: torch.Tensor, token_ids: Collection[int]) -> torch.Tensor:
    """Take tokens out of a bitmask, in place, unless that would leave none."""
    words = bitmask.numpy().view("uint32")
    before = words.copy()
    for token_id in token_ids:
        words[token_id // BITS_PER_WORD] &= ~(1 << token_id % BITS_PER_WORD) & 0xFFFFFFFF
    if not words.any():
        words[:] = before
    return bitmask


def _refusal(message: str) -> InvalidParameterError:
    return InvalidParameterError(message, GRAMMAR_PARAM)
