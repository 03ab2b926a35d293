"""From token ids to text, piece by piece.

Feed ids, get the text that is final; flush at the end. Text is held back in two cases only: the
last character may still be incomplete, or the text's end may be the beginning of a stop string. The
pieces joined are the whole text: an answer that is not streamed is made from the same pieces.

A window of ids is decoded, not all: those of the last finished piece, for tokenizers whose text
depends on the left neighbour, and those behind it.
"""

import logging
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

INCOMPLETE = "\ufffd"
"""What decoders put in the place of bytes that make no character (yet)."""

MAX_HELD_TOKENS = 16
"""An incomplete character spans fewer tokens than this. A longer window is cut where it can be, so
that a long run of bytes that never make a character costs no more than other text."""

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


class UndecodableError(ValueError):
    """The tokenizer can't make text of a sequence's ids."""


def decode_with(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> Decode:
    """Return what turns token ids into text; special tokens become nothing, or their names.

    It raises an `UndecodableError` for whatever the tokenizer raises.
    """
    bare = _bare_decode(tokenizer, skip_special_tokens)

    def decode(token_ids: Sequence[int]) -> str:
        try:
            text = bare(list(token_ids))
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            # Where it came from, but not its message, which may hold a client's text.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("decoding failed: %s\n%s", type(error).__name__, where)
            raise UndecodableError("the tokenizer can't decode these ids") from None
        assert isinstance(text, str)
        return text

    return decode


def _bare_decode(
    tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool
) -> Callable[[list[int]], object]:
    """Return the tokenizer's decoding without transformers' layers, where they add nothing.

    They take four times as long as the decoding itself.
    """
    is_stock = all(
        getattr(getattr(tokenizer, name), "__func__", None) is getattr(owner, name)
        for name, owner in (
            ("decode", PreTrainedTokenizerBase),
            ("_decode", PreTrainedTokenizerFast),
        )
        if hasattr(tokenizer, name)
    )
    if isinstance(tokenizer, PreTrainedTokenizerFast) and is_stock:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


class Detokenizer:
    """The text of one sequence."""

    __slots__ = (
        "_decode",
        "_num_exempt",
        "_num_finished",
        "_num_sent",
        "_num_tokens_left",
        "_stop",
        "_text_held",
        "_window",
    )

    def __init__(self, decode: Decode, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Start with no text.

        Args:
            decode: Turns token ids into text.
            stop: Strings that end the text.
            min_tokens: A stop string that is complete after so many ids ends nothing.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._num_finished = 0  # ids of the window whose text is complete and was returned
        self._num_sent = 0  # characters of the window's text that were returned
        self._text_held = ""
        self._num_tokens_left = min_tokens
        self._num_exempt = 0  # characters of the held text in which no stop string may end

    def advance(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, bool]:
        """Take a sequence's newest ids, none if they make no text, and whether it ends there.

        Returns:
            The text that is final, and whether a stop string has ended it.
        """
        text, is_stopped = self.feed(token_ids)
        if is_last and not is_stopped:
            rest, is_stopped = self.flush()
            text += rest
        return text, is_stopped

    def feed(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Take new ids; return the text that is final, and whether a stop string has ended it."""
        text = ""
        for token_id in token_ids:
            self._window.append(token_id)
            piece, is_stopped = self._release(self._next_piece())
            self._num_tokens_left = max(0, self._num_tokens_left - 1)
            text += piece
            if is_stopped:
                return text, True
        return text, False

    def flush(self) -> tuple[str, bool]:
        """Return what was held back, and whether a stop string has ended it."""
        piece, is_stopped = self._release(self._decode(self._window)[self._num_sent :])
        text, self._text_held = piece + self._text_held, ""
        return text, is_stopped

    def _next_piece(self) -> str:
        """Return the text that the newest id has completed."""
        text = self._decode(self._window)
        complete = text.rstrip(INCOMPLETE)
        piece = complete[self._num_sent :]
        self._num_sent += len(piece)
        if piece and complete == text:
            del self._window[: self._num_finished]
            self._num_finished = len(self._window)
            self._num_sent = len(self._decode(self._window))
        elif len(self._window) - self._num_finished >= MAX_HELD_TOKENS:
            piece += self._cut(text)
        return piece

    def _cut(self, text: str) -> str:
        """Let go of the window's beginning, if its text does not depend on what follows."""
        for split in range(len(self._window) - 1, len(self._window) - 5, -1):
            left, right = self._decode(self._window[:split]), self._decode(self._window[split:])
            if left + right == text and len(left) >= self._num_sent:
                piece = left[self._num_sent :]
                del self._window[:split]
                self._num_finished = self._num_sent = 0
                return piece
        return ""

    def _release(self, piece: str) -> tuple[str, bool]:
        """Add a piece to what is held; return what can't belong to a stop string."""
        if not self._stop:
            return piece, False
        text = self._text_held + piece
        if self._num_tokens_left:
            self._num_exempt = len(text)
        starts = (text.find(s, max(0, self._num_exempt - len(s) + 1)) for s in self._stop)
        found = [at for at in starts if at >= 0]
        if found:
            self._text_held = ""
            return text[: min(found)], True
        num_held = max(_overlap(text, stop) for stop in self._stop)
        split = len(text) - num_held
        self._text_held = text[split:]
        self._num_exempt = max(0, self._num_exempt - split)
        return text[:split], False


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
