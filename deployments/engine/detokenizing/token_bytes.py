"""The exact bytes that each token adds to the text.

A decoder can't give them: a token that holds part of a character decodes to U+FFFD. So the bytes
are read from the vocabulary, which encodes them by tokenizer type:

- byte-level (GPT-2 and similar): one printable character for each byte;
- sentencepiece: `<0xE2>` for a byte, U+2581 for a space, other text verbatim;
- any other: the decoded text of the single token.

Added tokens, including special ones, are verbatim in the vocabulary.

Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py; for byte
fallback https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import count

import torch
from transformers import PreTrainedTokenizerBase

from deployments.contract.output import PromptLogprobs, TokenLogprob, TokenLogprobs
from deployments.engine.sampling.logprobs import PositionLogprobs, PromptScores

SPACE_OF_SENTENCEPIECE = "\u2581"

MAX_PART_ENTRIES = 1024
"""Log-probabilities in one part of a prompt's. The ingress writes each in some ten microseconds,
and does other work between two parts."""

logger = logging.getLogger(__name__)

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of one tokenizer's tokens; each token is computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        # The pickled state is JSON, and the only way to see which decoders it contains.
        state: bytes = decoder.__getstate__() if decoder is not None else b""
        self._is_byte_level = b'"ByteLevel"' in state
        self._is_sentencepiece = b'"ByteFallback"' in state or b'"Metaspace"' in state
        self._added = {i: str(added) for i, added in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; empty if the tokenizer does not know the id or raises on it."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._try_to_read(token_id)
        return found

    def describe(
        self, token_id: int, logprobs: PositionLogprobs | None
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities for a token's delta; empty if they were not requested."""
        if logprobs is None:
            return ()
        top = tuple(TokenLogprob(i, self.of(i), logprob) for i, logprob in logprobs.top)
        chosen = TokenLogprob(token_id, self.of(token_id), logprobs.chosen)
        return (TokenLogprobs(chosen, top),)

    def describe_prompt(
        self, first_id: int | None, scores: PromptScores
    ) -> Iterator[PromptLogprobs]:
        """Yield the log-probabilities of a prompt's next tokens, packed, in parts of at least one.

        Args:
            first_id: The prompt's first token if the others follow it, else None.
            scores: Those of the others.
        """
        num_tokens, width = scores.token_ids.shape
        num_rows = max(1, MAX_PART_ENTRIES // width)
        for start in range(0, max(1, num_tokens), num_rows):
            rows = slice(start, start + num_rows)
            token_ids = torch.unique(scores.token_ids[rows]).tolist()
            yield PromptLogprobs(
                None if first_id is None else (first_id, self.of(first_id)),
                width - 1,
                scores.token_ids[rows].numpy().astype("<i4").tobytes(),
                scores.logprobs[rows].numpy().astype("<f4").tobytes(),
                scores.ranks[rows].numpy().astype("<i4").tobytes(),
                tuple((i, self.of(i)) for i in token_ids),
            )
            first_id = None

    def _try_to_read(self, token_id: int) -> bytes:
        # The token may be a likely one that was not chosen, so an error must not end the sequence.
        try:
            return self._read(token_id)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            logger.warning("token %d has no bytes: %s", token_id, type(error).__name__)
            return b""

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self._is_byte_level:
            return _read_byte_level(token)
        if self._is_sentencepiece:
            return _read_sentencepiece(token)
        return str(self._tokenizer.decode([token_id])).encode()


def _read_byte_level(token: str) -> bytes:
    # A character outside the byte alphabet is kept as text.
    return b"".join(
        bytes([_BYTES[character]]) if character in _BYTES else character.encode()
        for character in token
    )


def _read_sentencepiece(token: str) -> bytes:
    match = _FALLBACK_BYTE.fullmatch(token)
    if match:
        return bytes.fromhex(match[1])
    return token.replace(SPACE_OF_SENTENCEPIECE, " ").encode()


def _byte_level_alphabet() -> Mapping[str, int]:
    """Return the byte for each character; printable bytes map to themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTES = _byte_level_alphabet()
