"""Encodes texts as token ids, for requests that arrive together.

The name of a special token inside a text is encoded as plain text, not as the token. Token ids that
a client sends are taken as they are. Each request gets its tokens or its own error.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    PoolingFailedError,
    RaystreamError,
)
from deployments.contract.pooling import PoolingInput, PoolingRequest, TextPair
from deployments.pooling.request_queue import TokenIds

logger = logging.getLogger(__name__)

PARAM = "input"
"""The request's field that holds the texts."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The texts of one request.

    Attributes:
        token_ids: The tokens of each text, special ones included.
        are_truncated: Whether the end of each text was dropped.
        type_ids: Which of a pair's texts each token belongs to, as the model's tokenizer numbers
            them; None for a text if all belong to the first.
    """

    token_ids: tuple[TokenIds, ...]
    are_truncated: tuple[bool, ...]
    type_ids: tuple[TokenIds | None, ...]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of one text; see `EncodedTexts`."""

    ids: TokenIds
    types: TokenIds | None = None
    is_truncated: bool = False


class TextEncoder:
    """Encodes texts for one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_model_len: int,
        vocab_size: int | None = None,
        *,
        reads_types: bool = True,
    ) -> None:
        """Wrap a model's tokenizer.

        Args:
            tokenizer: The tokenizer.
            max_model_len: The most tokens of a text that the model reads.
            vocab_size: The number of tokens that the model knows; None: as many as the tokenizer.
            reads_types: Whether the model tells a pair's texts apart by the types of tokens.
        """
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self._has_types = reads_types and "token_type_ids" in tokenizer.model_input_names

    def encode(self, requests: Sequence[PoolingRequest]) -> list[EncodedTexts | RaystreamError]:
        """Encode requests together, in one call of the tokenizer.

        If that fails, each request gets a separate call, and only those that fail get an error.
        """
        try:
            return self._encode_together(requests)
        except Exception:  # noqa: BLE001 - a model's own tokenizer may raise anything
            return [self._encode_alone(request) for request in requests]

    def _encode_alone(self, request: PoolingRequest) -> EncodedTexts | RaystreamError:
        try:
            (encoded,) = self._encode_together([request])
        except Exception as error:  # noqa: BLE001 - as above
            # Neither the client nor the log gets the exception's message: it may quote the text.
            logger.error("the model's tokenizer raised %s", type(error).__name__)
            return PoolingFailedError(
                "The model's tokenizer failed on this text.", self._culprit(request)
            )
        return encoded

    def _culprit(self, request: PoolingRequest) -> str:
        """Return the parameter of the text that fails, or of all texts if none fails by itself."""
        for index, text in enumerate(request.texts):
            try:
                self._tokenize([text], self._max_length(request) if request.truncate else None)
            except Exception:  # noqa: BLE001 - as above
                return _param(index)
        return PARAM

    def _encode_together(
        self, requests: Sequence[PoolingRequest]
    ) -> list[EncodedTexts | RaystreamError]:
        invalid = [self._problem(request) for request in requests]
        texts = [
            text
            for request, problem in zip(requests, invalid, strict=True)
            if problem is None
            for text in request.texts
        ]
        tokens = iter(self._tokenize(texts))
        return [
            problem or self._finish(request, [next(tokens) for _ in request.texts])
            for request, problem in zip(requests, invalid, strict=True)
        ]

    def _tokenize(
        self,
        texts: Sequence[PoolingInput],
        max_length: int | None = None,
        cut: str = "longest_first",
    ) -> list[_Tokens]:
        """Encode texts, in one call for plain ones and one for pairs.

        Args:
            texts: Texts of any kind.
            max_length: The most tokens of each; None keeps all.
            cut: Which of a pair's texts loses tokens, in transformers' words.
        """
        plain = [text for text in texts if isinstance(text, str)]
        pairs = [text for text in texts if isinstance(text, TextPair)]
        of_plain = iter(self._call(plain, None, max_length, cut))
        firsts, seconds = [pair.first for pair in pairs], [pair.second for pair in pairs]
        of_pairs = iter(self._call(firsts, seconds, max_length, cut))
        return [
            next(of_plain)
            if isinstance(text, str)
            else next(of_pairs)
            if isinstance(text, TextPair)
            else _Tokens(text[:max_length])
            for text in texts
        ]

    def _call(
        self, texts: list[str], seconds: list[str] | None, max_length: int | None, cut: str
    ) -> list[_Tokens]:
        if not texts:
            return []
        has_types = self._has_types and seconds is not None
        found = self._tokenizer(
            texts,
            text_pair=seconds,
            truncation=cut if max_length is not None else False,
            max_length=max_length,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=has_types,
            verbose=False,
        )
        types = found["token_type_ids"] if has_types else [()] * len(texts)
        return [
            _Tokens(tuple(ids), tuple(own) if any(own) else None)
            for ids, own in zip(found["input_ids"], types, strict=True)
        ]

    def _finish(
        self, request: PoolingRequest, tokens: list[_Tokens]
    ) -> EncodedTexts | RaystreamError:
        """Truncate texts that are too long, or return the error."""
        max_length = self._max_length(request)
        finished: list[_Tokens] = []
        for index, (text, own) in enumerate(zip(request.texts, tokens, strict=True)):
            is_whole = index < request.num_whole
            max_text_tokens = None if is_whole else request.max_text_tokens
            found = self._shorten(text, own, max_text_tokens)
            if not found.ids:
                return InvalidRequestError(
                    "The text has no tokens; the model needs at least one.", _param(index)
                )
            if len(found.ids) > max_length:
                if not request.truncate:
                    return self._too_long(index, len(found.ids))
                found = self._truncate(text, found, max_length, max_text_tokens)
            finished.append(_Tokens(found.ids, found.types, len(found.ids) < len(own.ids)))
        return EncodedTexts(
            tuple(each.ids for each in finished),
            tuple(each.is_truncated for each in finished),
            tuple(each.types for each in finished),
        )

    def _shorten(self, text: PoolingInput, tokens: _Tokens, max_text_tokens: int | None) -> _Tokens:
        """Drop the end of a text, or of a pair's second text, that has more tokens than this."""
        if max_text_tokens is None or isinstance(text, tuple) or len(tokens.ids) <= max_text_tokens:
            return tokens
        is_pair = isinstance(text, TextPair)
        own = self._own_tokens(text.second if isinstance(text, TextPair) else text)
        num_excess = len(own) - max_text_tokens
        if num_excess <= 0:
            return tokens
        cut = "only_second" if is_pair else "only_first"
        (found,) = self._tokenize([text], len(tokens.ids) - num_excess, cut)
        return found

    def _truncate(
        self, text: PoolingInput, tokens: _Tokens, max_length: int, max_text_tokens: int | None
    ) -> _Tokens:
        """Drop the end of a text, or of a pair's longer text, that has been shortened."""
        if isinstance(text, TextPair) and max_text_tokens is not None:
            num_kept = max_length - self._tokenizer.num_special_tokens_to_add(pair=True)
            if 2 * max_text_tokens < num_kept:  # the second text is the shorter one, and stays
                return self._cut_first(text.first, tokens, max_length)
        (found,) = self._tokenize([text], max_length)
        return found

    def _cut_first(self, first: str, tokens: _Tokens, max_length: int) -> _Tokens:
        """Drop the end of a pair's first text."""
        own = self._own_tokens(first)
        before = range(len(tokens.ids) - len(own) + 1)
        begin = next(i for i in before if tokens.ids[i : i + len(own)] == own)
        end = begin + len(own)
        start = end - (len(tokens.ids) - max_length)
        types = tokens.types and tokens.types[:start] + tokens.types[end:]
        return _Tokens(tokens.ids[:start] + tokens.ids[end:], types)

    def _own_tokens(self, text: str) -> TokenIds:
        """Return a text's tokens without special ones."""
        found = self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return tuple(found["input_ids"])

    def _max_length(self, request: PoolingRequest) -> int:
        """Return the most tokens of a text that the model reads."""
        if not request.truncate or request.max_num_tokens is None:
            return self._max_model_len
        return request.max_num_tokens

    def _problem(self, request: PoolingRequest) -> InvalidRequestError | None:
        """Return the error that prevents encoding a request, if there is one."""
        if not request.texts:
            return InvalidRequestError("There is no text.", PARAM)
        for index, text in enumerate(request.texts):
            if isinstance(text, tuple):
                if not all(0 <= token_id < self._vocab_size for token_id in text):
                    return InvalidRequestError(
                        f"Token ids are from 0 to {self._vocab_size - 1} for this model.",
                        _param(index),
                    )
            elif not _is_unicode(text):
                return InvalidRequestError("The text is not valid Unicode.", _param(index))
        return self._length_problem(request)

    def _length_problem(self, request: PoolingRequest) -> InvalidRequestError | None:
        """Return the error in the length that a request sets, if there is one."""
        if request.max_num_tokens is None:
            return None
        length = self._max_length(request)
        fewest = 1 + max(map(self._num_special_tokens, request.texts))
        if fewest <= length <= self._max_model_len:
            return None
        return InvalidRequestError(
            f"Texts can't be truncated to {length} tokens; choose from {fewest} to "
            f"{self._max_model_len}, the most that the model reads.",
            "truncate_prompt_tokens",
        )

    def _num_special_tokens(self, text: PoolingInput) -> int:
        """Return how many special tokens a text gets; token ids get none."""
        if isinstance(text, tuple):
            return 0
        num: int = self._tokenizer.num_special_tokens_to_add(pair=isinstance(text, TextPair))
        return num

    def _too_long(self, index: int, num_tokens: int) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"The text has {num_tokens} tokens, and the model reads {self._max_model_len} at most.",
            _param(index),
        )


def _param(index: int) -> str:
    """Return the parameter of a text; the ingress, which split the texts, adds advice."""
    return f"{PARAM}[{index}]"


def _is_unicode(text: str | TextPair) -> bool:
    """Return whether a text can be encoded: JSON allows half of a surrogate pair."""
    try:
        for part in (text,) if isinstance(text, str) else (text.first, text.second):
            part.encode()
    except UnicodeEncodeError:
        return False
    return True
