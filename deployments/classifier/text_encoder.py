"""Encodes texts as token ids, for requests that arrive together.

The name of a special token inside a text is encoded as plain text, not as the token. Each request
gets its tokens or its own error.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from deployments.contract import ClassificationRequest
from deployments.errors import (
    ClassificationFailedError,
    ContextLengthExceededError,
    InvalidRequestError,
    RaystreamError,
)

logger = logging.getLogger(__name__)

PARAM = "input"
"""The request's field that holds the texts."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The texts of one request.

    Attributes:
        token_ids: The tokens of each text, special ones included.
        are_truncated: Whether the end of each text was dropped.
    """

    token_ids: tuple[tuple[int, ...], ...]
    are_truncated: tuple[bool, ...]


class TextEncoder:
    """Encodes texts for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def encode(
        self, requests: Sequence[ClassificationRequest]
    ) -> list[EncodedTexts | RaystreamError]:
        """Encode requests together, in one call of the tokenizer.

        If that fails, each request gets a separate call, and only those that fail get an error.
        """
        try:
            return self._encode_together(requests)
        except Exception:  # noqa: BLE001 - a model's own tokenizer may raise anything
            return [self._encode_alone(request) for request in requests]

    def _encode_alone(self, request: ClassificationRequest) -> EncodedTexts | RaystreamError:
        try:
            (encoded,) = self._encode_together([request])
        except Exception as error:  # noqa: BLE001 - as above
            # Neither the client nor the log gets the exception's message: it may quote the text.
            logger.error("the model's tokenizer raised %s", type(error).__name__)
            return ClassificationFailedError(
                "The model's tokenizer failed on this text.", self._culprit(request)
            )
        return encoded

    def _culprit(self, request: ClassificationRequest) -> str:
        """Return the parameter of the text that fails, or of all texts if none fails by itself."""
        for index, text in enumerate(request.texts):
            try:
                self._tokenize([text], self._max_length(request) if request.truncate else None)
            except Exception:  # noqa: BLE001 - as above
                return _param(index)
        return PARAM

    def _encode_together(
        self, requests: Sequence[ClassificationRequest]
    ) -> list[EncodedTexts | RaystreamError]:
        invalid = [_problem(request) or self._length_problem(request) for request in requests]
        texts = [
            text
            for request, problem in zip(requests, invalid, strict=True)
            if problem is None
            for text in request.texts
        ]
        token_ids = iter(self._tokenize(texts))
        return [
            problem or self._finish(request, [next(token_ids) for _ in request.texts])
            for request, problem in zip(requests, invalid, strict=True)
        ]

    def _tokenize(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        if not texts:
            return []
        found: list[list[int]] = self._tokenizer(
            texts,
            truncation=max_length is not None,
            max_length=max_length,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return found

    def _finish(
        self, request: ClassificationRequest, token_ids: list[list[int]]
    ) -> EncodedTexts | RaystreamError:
        """Truncate texts that are too long, or return the error."""
        max_length = self._max_length(request)
        are_truncated = tuple(len(ids) > max_length for ids in token_ids)
        for index, ids in enumerate(token_ids):
            if not ids:
                return InvalidRequestError(
                    "The text has no tokens; the model needs at least one.", _param(index)
                )
            if are_truncated[index] and not request.truncate:
                return self._too_long(index, len(ids))
            if are_truncated[index]:
                (token_ids[index],) = self._tokenize([request.texts[index]], max_length)
        return EncodedTexts(tuple(map(tuple, token_ids)), are_truncated)

    def _max_length(self, request: ClassificationRequest) -> int:
        """Return the most tokens of a text that the model reads."""
        if not request.truncate or request.max_num_tokens is None:
            return self._max_model_len
        return request.max_num_tokens

    def _length_problem(self, request: ClassificationRequest) -> InvalidRequestError | None:
        """Return the error in the length that a request sets, if there is one."""
        if request.max_num_tokens is None:
            return None
        length = self._max_length(request)
        fewest = self._tokenizer.num_special_tokens_to_add() + 1
        if fewest <= length <= self._max_model_len:
            return None
        return InvalidRequestError(
            f"Texts can't be truncated to {length} tokens; choose from {fewest} to "
            f"{self._max_model_len}, the most that the model reads.",
            "truncate_prompt_tokens",
        )

    def _too_long(self, index: int, num_tokens: int) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"The text has {num_tokens} tokens, and the model reads {self._max_model_len} at most.",
            _param(index),
        )


def _param(index: int) -> str:
    """Return the parameter of a text; the ingress, which split the texts, adds advice."""
    return f"{PARAM}[{index}]"


def _problem(request: ClassificationRequest) -> InvalidRequestError | None:
    """Return the error that prevents encoding a request, if there is one."""
    if not request.texts:
        return InvalidRequestError("There is no text to classify.", PARAM)
    for index, text in enumerate(request.texts):
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair; JSON allows it
            return InvalidRequestError("The text is not valid Unicode.", _param(index))
    return None
