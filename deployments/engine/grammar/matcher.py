"""Applies a grammar to a sequence, as a mask over the vocabulary.

llguidance does the work: before each token, its parser over bytes says which tokens may come next.
A `GrammarCompiler` belongs to a model. A `GrammarMatcher` belongs to one sequence, not to a slot or
a step, so it stays valid when the sequence moves or is recomputed. A `ReasoningMatcher` lets its
sequence reason first.

Grammars come from clients, so their cost is bounded (`deployments.contract.grammar.limits`). When a
grammar exceeds a limit or leads into a dead end, only its own sequence ends with an error.

llguidance is imported with the first grammar: an engine without grammars runs without it.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from collections.abc import Collection, Sequence
from copy import copy
from enum import Enum, auto
from threading import Lock
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deployments.contract.sampling_params import (
    GRAMMAR_PARAM,
    InvalidParameterError,
    ReasoningTokens,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

BITS_PER_WORD = 32
UNCONSTRAINABLE = "this model's tokenizer can't be constrained by a grammar; ask for text"


class GrammarMatcher:
    """Says which tokens may come next in one sequence.

    Attributes:
        error: Why the sequence can't continue; None while it can.
    """

    __slots__ = ("_bitmask", "_matcher", "error")

    def __init__(self, matcher: "LLMatcher", num_tokens: int) -> None:
        """Wrap a new matcher over a vocabulary of `num_tokens` tokens."""
        self._matcher = matcher
        num_words = -(-num_tokens // BITS_PER_WORD)
        self._bitmask = torch.zeros(num_words, dtype=torch.int32)
        self.error: str | None = None
        self._note_error()

    def bitmask(self, barred_token_ids: Collection[int] = ()) -> torch.Tensor:
        """Return which tokens may come next; none after an error.

        Args:
            barred_token_ids: Tokens to leave out, unless the grammar allows only those.

        Returns:
            [words], int32, on the host: token i is bit i % 32 of word i // 32. Valid until the next
            call.
        """
        if self.error is None:
            mask = self._bitmask
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
            self._note_error()
        if self.error is not None:
            return self._bitmask.zero_()
        return _clear_bits(self._bitmask, barred_token_ids) if barred_token_ids else self._bitmask

    def advance(self, token_id: int) -> bool:
        """Consume the sequence's next token; return whether the grammar allows no more after it."""
        self._matcher.consume_token(token_id)
        self._note_error()
        return self.error is None and self._matcher.is_stopped()

    def copy(self) -> "GrammarMatcher":
        """Return another that has consumed the same; it costs a small part of a compilation."""
        return GrammarMatcher(self._matcher.deep_copy(), self._bitmask.numel() * BITS_PER_WORD)

    def _note_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            # Only the first line: the parser's state may follow.
            self.error = self._matcher.get_error().partition("\n")[0]


class FreeMatcher:
    """Allows any text: what follows reasoning where no grammar binds the answer."""

    __slots__ = ("_everything",)

    error: None = None
    """Never set; see `GrammarMatcher`."""

    def __init__(self, num_tokens: int) -> None:
        """Allow all of `num_tokens` tokens."""
        self._everything = torch.full((-(-num_tokens // BITS_PER_WORD),), -1, dtype=torch.int32)

    def bitmask(self, barred_token_ids: Collection[int] = ()) -> torch.Tensor:
        """Return which tokens may come next; see `GrammarMatcher.bitmask`."""
        return _clear_bits(self._everything.clone(), barred_token_ids)

    def advance(self, token_id: int) -> bool:
        """Return False: any token may follow any other."""
        return False

    def copy(self) -> "FreeMatcher":
        """Return itself: it keeps nothing of what it consumes."""
        return self


class _State(Enum):
    BEGINNING = auto()  # the first token may begin the reasoning, or the grammar's text
    CHANNEL = auto()  # the next token says whether the reasoning begins
    HEADER = auto()  # the next token ends the header of the reasoning
    REASONING = auto()
    ANSWER = auto()


class ReasoningMatcher:
    """Lets a sequence reason before it follows a grammar, if there is one; see `GrammarMatcher`.

    The marks around the reasoning are single tokens, so their ids say where it begins and ends.
    While the sequence reasons, every token may come next except those that would end the text: so a
    text that ends by itself is always one of the grammar's. Once the reasoning has as many tokens
    as it may have, only its end may come. A stop string may end the text earlier, also inside the
    reasoning, as in vLLM.

    On channels there is no grammar, and each message may be reasoning. All of them share what the
    reasoning may have; after that, the channel's name may come no more. It is barred as one token:
    the same name in several tokens, which the model was never trained to write, is not.
    """

    __slots__ = ("_eos_token_ids", "_everything", "_matcher", "_num_left", "_state", "_tokens")

    def __init__(
        self,
        matcher: GrammarMatcher | FreeMatcher,
        tokens: ReasoningTokens,
        eos_token_ids: Collection[int],
    ) -> None:
        """Start before the first generated token.

        Args:
            matcher: The grammar of the text after the reasoning.
            tokens: The marks around the reasoning.
            eos_token_ids: Tokens that would end the text; barred while the sequence reasons.
        """
        self._matcher = matcher
        self._tokens = tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._everything = torch.full_like(matcher.bitmask(), -1)
        self._num_left = tokens.max_tokens
        self._state = _State.REASONING if tokens.has_begun else _State.BEGINNING

    @property
    def error(self) -> str | None:
        """Why the sequence can't continue; None while it can."""
        return self._matcher.error

    def bitmask(self, barred_token_ids: Collection[int] = ()) -> torch.Tensor:
        """Return which tokens may come next; see `GrammarMatcher.bitmask`."""
        match self._state:
            case _State.ANSWER:
                return self._matcher.bitmask(barred_token_ids)
            case _State.CHANNEL if self._num_left == 0 and self._tokens.channel is not None:
                barred = frozenset((self._tokens.channel, *barred_token_ids))
                return _clear_bits(self._everything.clone(), barred)
            case _State.CHANNEL | _State.HEADER:
                return _clear_bits(self._everything.clone(), barred_token_ids)
            case _State.REASONING if self._num_left == 0:
                return _set_bit(torch.zeros_like(self._everything), self._tokens.end)
            case _State.REASONING:
                barred = self._eos_token_ids.union(barred_token_ids)
                return _clear_bits(self._everything.clone(), barred)
            case _State.BEGINNING:
                mask = self._matcher.bitmask(barred_token_ids)
                is_possible = self.error is None and self._tokens.start not in barred_token_ids
                return _set_bit(mask, self._tokens.start) if is_possible else mask

    def advance(self, token_id: int) -> bool:
        """Consume the sequence's next token; return whether no more is allowed after it."""
        if self._tokens.channel is not None:
            self._state = self._next_on_channels(token_id, self._tokens.channel)
            return False
        if self._state is _State.REASONING:
            self._state = self._next_of_reasoning(token_id)
            return False
        if self._state is _State.BEGINNING and token_id == self._tokens.start:
            self._state = _State.REASONING
            return False
        self._state = _State.ANSWER
        return self._matcher.advance(token_id)

    def copy(self) -> "ReasoningMatcher":
        """Return another that has consumed the same; see `GrammarMatcher.copy`."""
        copied = copy(self)
        copied._matcher = self._matcher.copy()
        return copied

    def _next_on_channels(self, token_id: int, channel: int) -> _State:
        # The mark begins the next message, whether the reasoning's own end has come or not.
        if token_id == self._tokens.start:
            return _State.CHANNEL
        if self._state is _State.CHANNEL and token_id == channel:
            return _State.HEADER
        if self._state is _State.HEADER and token_id != self._tokens.end:
            return _State.REASONING
        if self._state is _State.REASONING:
            return self._next_of_reasoning(token_id)
        return _State.ANSWER

    def _next_of_reasoning(self, token_id: int) -> _State:
        if token_id == self._tokens.end:
            return _State.ANSWER
        if self._num_left is not None:
            self._num_left = max(0, self._num_left - 1)
        return _State.REASONING


TokenMatcher = GrammarMatcher | ReasoningMatcher | FreeMatcher


class GrammarCompiler:
    """Makes matchers for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """Store the inputs; the vocabulary is built with the first grammar.

        Args:
            tokenizer: The model's tokenizer.
            vocab_size: How many logits the model gives.
            eos_token_ids: Tokens that may end a text where the grammar lets it end.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._lock = Lock()

    def compile(
        self,
        grammar: str | None,
        generated_token_ids: Sequence[int] = (),
        reasoning: ReasoningTokens | None = None,
    ) -> TokenMatcher:
        """Return a matcher that has consumed the generated tokens.

        Takes from under a millisecond to some hundred milliseconds; the first call up to a second.

        Args:
            grammar: As llguidance serializes it; None binds only the length of the reasoning.
            generated_token_ids: The tokens of the text so far.
            reasoning: The marks of reasoning that may come before the grammar's text.

        Raises:
            InvalidParameterError: The grammar is invalid, too large or allows no text, the tokens
                violate it, or the tokenizer can't be constrained.
        """
        matcher: GrammarMatcher | FreeMatcher
        if grammar is None:
            matcher = FreeMatcher(max(self._vocab_size, len(self._tokenizer)))
        else:
            matcher = self._grammar_matcher(grammar)
        following: TokenMatcher = matcher
        if reasoning is not None:
            # Without a grammar, the text may end anywhere.
            eos_token_ids = () if grammar is None else self._eos_token_ids
            following = ReasoningMatcher(matcher, reasoning, eos_token_ids)
        for token_id in generated_token_ids:
            following.advance(token_id)
        if following.error is not None:
            raise _refusal(f"the generated tokens violate the grammar: {following.error}")
        return following

    def _grammar_matcher(self, grammar: str) -> GrammarMatcher:
        from llguidance import LLMatcher

        from deployments.contract.grammar.limits import parser_limits

        vocabulary = self._constrained_vocabulary()
        bare = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits(grammar))
        matcher = GrammarMatcher(bare, vocabulary.vocab_size)
        # The first mask does much of the work, and shows whether the grammar allows any text.
        matcher.bitmask()
        if matcher.error is not None:
            raise _refusal(f"the grammar can't be used: {matcher.error}")
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
        # Logits may be wider than the tokenizer, if padded to a round number, or narrower.
        num_tokens = max(self._vocab_size, len(self._tokenizer))
        try:
            return from_tokenizer(
                self._tokenizer, n_vocab=num_tokens, eos_token=self._eos_token_ids or None
            )
        except ValueError as error:
            raise _refusal(UNCONSTRAINABLE) from error


def unpack(bitmasks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the tokens that may not come next: [n, vocab], bool.

    Args:
        bitmasks: [n, words], int32, from `GrammarMatcher.bitmask`, on any device.
        vocab_size: How many logits a row has; at most the bits of a bitmask.
    """
    # Read the words as bytes: on a little-endian machine, their bits are in token order.
    places = torch.arange(8, dtype=torch.uint8, device=bitmasks.device)
    bits = bitmasks.view(torch.uint8)[:, :, None] >> places & 1
    return (bits == 0).flatten(1)[:, :vocab_size]


def _clear_bits(bitmask: torch.Tensor, token_ids: Collection[int]) -> torch.Tensor:
    """Clear tokens in a bitmask, in place, unless that would leave none."""
    words = bitmask.numpy().view("uint32")
    before = words.copy()
    for token_id in token_ids:
        words[token_id // BITS_PER_WORD] &= ~(1 << token_id % BITS_PER_WORD) & 0xFFFFFFFF
    if not words.any():
        words[:] = before
    return bitmask


def _set_bit(bitmask: torch.Tensor, token_id: int) -> torch.Tensor:
    """Set a token's bit in a bitmask, in place."""
    words = bitmask.numpy().view("uint32")
    words[token_id // BITS_PER_WORD] |= 1 << token_id % BITS_PER_WORD
    return bitmask


def _refusal(message: str) -> InvalidParameterError:
    return InvalidParameterError(message, GRAMMAR_PARAM)
