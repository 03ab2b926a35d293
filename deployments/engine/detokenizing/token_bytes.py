"""What each token adds to the text, byte by byte.

A decoder can't say it: a token that holds a part of a character decodes to U+FFFD alone. So the
bytes are read from the vocabulary, by the way in which the tokenizer writes them there:

- byte-level (GPT-2 and its like): one printable character for each byte;
- as sentencepiece: `<0xE2>` for a byte, U+2581 for a space, other text as it is;
- any other: what the decoder makes of the token alone.

Added tokens, special ones among them, stand in the vocabulary as they are.

Source: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py; for byte
fallback https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

import logging
import re
from collections.abc import Mapping
from itertools import count

from transformers import PreTrainedTokenizerBase

from deployments.engine.logprobs import PositionLogprobs
from deployments.engine.output import TokenLogprob, TokenLogprobs

SPACE_OF_SENTENCEPIECE = "\u2581"

logger = logging.getLogger(__name__)

_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of one tokenizer's tokens; each is worked out once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find out how the tokenizer writes bytes."""
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        # The state is the decoder's JSON: the only view of what it is made of.
        state: bytes = decoder.__getstate__() if decoder is not None else b""
        self._is_byte_level = b'"ByteLevel"' in state
        self._is_sentencepiece = b'"ByteFallback"' in state or b'"Metaspace"' in state
        self._added = {i: str(added) for i, added in tokenizer.added_tokens_decoder.items()}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that the tokenizer does not know or raises on."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._try_to_read(token_id)
        return found

    def describe(
        self, token_id: int, logprobs: PositionLogprobs | None
    ) -> tuple[TokenLogprobs, ...]:
        """Return what a delta tells of a token; nothing if it was not asked for."""
        if logprobs is None:
            return ()
        top = tuple(TokenLogprob(i, self.of(i), logprob) for i, logprob in logprobs.top)
        chosen = TokenLogprob(token_id, self.of(token_id), logprobs.chosen)
        return (TokenLogprobs(chosen, top),)

    def _try_to_read(self, token_id: int) -> bytes:
        # It may be one that was merely likely: no reason to end the sequence.
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
    # A character that stands for no byte is not the alphabet's; it is then taken as text.
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
    """Return the byte of each character: printable ones stand for themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTES = _byte_level_alphabet()
