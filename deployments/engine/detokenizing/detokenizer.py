"""Incremental detokenization: token ids to text.

Feed ids, get the text that is final; flush at the end. Text is held back in two cases only: the
last character may be incomplete, or the text's end may be the beginning of a stop string. The texts
returned add up to the whole text; answers that are not streamed are built from them, too.

Only a window of ids is decoded: the ids of the latest finished text, for tokenizers whose text
depends on the preceding token, and the ids after it.
"""

import logging
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deployments.engine.detokenizing.call_spans import CallSpans

INCOMPLETE = "\ufffd"
"""The character that decoders emit for bytes that form no character, or none yet."""

MAX_HELD_TOKENS = 16
"""An incomplete character spans fewer tokens than this. A longer window is trimmed if possible, so
that a long run of invalid bytes costs no more than other text."""

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


class UndecodableError(ValueError):
    """The tokenizer can't decode a sequence's ids."""


def decode_with(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> Decode:
    """Return a function that decodes token ids; special tokens are skipped or become their names.

    It turns any error of the tokenizer into an `UndecodableError`.
    """
    bare = _bare_decode(tokenizer, skip_special_tokens)

    def decode(token_ids: Sequence[int]) -> str:
        try:
            text = bare(list(token_ids))
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            # Log where it was raised, but not its message, which may hold a client's text.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("decoding failed: %s\n%s", type(error).__name__, where)
            raise UndecodableError("the tokenizer can't decode these ids") from None
        assert isinstance(text, str)
        return text

    return decode


def _bare_decode(
    tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool
) -> Callable[[list[int]], object]:
    """Return the tokenizer's decode function, bypassing transformers' wrappers if they are stock.

    The wrappers take four times as long as the decoding itself.
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
    """Builds the text of one sequence.

    Attributes:
        stopped_by: The stop string that has ended the text; None if none has.
    """

    __slots__ = (
        "_calls",
        "_decode",
        "_num_exempt",
        "_num_finished",
        "_num_sent",
        "_num_tokens_left",
        "_stop",
        "_text_held",
        "_window",
        "stopped_by",
    )

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        call_mark: str | None = None,
    ) -> None:
        """Start with empty text.

        Args:
            decode: Turns token ids into text.
            stop: Strings that end the text.
            min_tokens: A stop string that is complete within this many ids does not end the text.
            call_mark: See `SamplingParams`.
        """
        self.stopped_by: str | None = None
        self._decode = decode
        self._stop = tuple(stop)
        self._calls = None if call_mark is None else CallSpans(call_mark)
        self._window: list[int] = []
        self._num_finished = 0  # ids of the window whose text was returned in full
        self._num_sent = 0  # characters of the window's text that were returned
        self._text_held = ""
        self._num_tokens_left = min_tokens
        self._num_exempt = 0  # characters of the held text where no stop string may end

    def advance(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, bool]:
        """Feed the newest ids, and flush if they are the last.

        Args:
            token_ids: The newest ids; empty if they add no text.
            is_last: Whether the sequence ends with them.

        Returns:
            The text that is final, and whether a stop string has ended it.
        """
        text, is_stopped = self.feed(token_ids)
        if is_last and not is_stopped:
            rest, is_stopped = self.flush()
            text += rest
        return text, is_stopped

    def feed(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Add ids; return the text that is final, and whether a stop string has ended it."""
        text = ""
        for token_id in token_ids:
            self._window.append(token_id)
            released, is_stopped = self._release(self._decode_newest())
            self._num_tokens_left = max(0, self._num_tokens_left - 1)
            text += released
            if is_stopped:
                return text, True
        return text, False

    def flush(self) -> tuple[str, bool]:
        """Return the text held back, and whether a stop string has ended it."""
        released, is_stopped = self._release(self._decode(self._window)[self._num_sent :])
        text, self._text_held = released + self._text_held, ""
        return text, is_stopped

    def _decode_newest(self) -> str:
        """Return the text that the newest id completes."""
        text = self._decode(self._window)
        complete = text.rstrip(INCOMPLETE)
        added = complete[self._num_sent :]
        self._num_sent += len(added)
        if added and complete == text:
            del self._window[: self._num_finished]
            self._num_finished = len(self._window)
            self._num_sent = len(self._decode(self._window))
        elif len(self._window) - self._num_finished >= MAX_HELD_TOKENS:
            added += self._trim_window(text)
        return added

    def _trim_window(self, text: str) -> str:
        """Drop the window's beginning if it decodes by itself; return its unsent text."""
        for split in range(len(self._window) - 1, len(self._window) - 5, -1):
            left, right = self._decode(self._window[:split]), self._decode(self._window[split:])
            if left + right == text and len(left) >= self._num_sent:
                added = left[self._num_sent :]
                del self._window[:split]
                self._num_finished = self._num_sent = 0
                return added
        return ""

    def _release(self, added: str) -> tuple[str, bool]:
        """Return the text that can't belong to a stop string, and whether one has ended it."""
        if not self._stop:
            return added, False
        if self._calls is None:
            return self._release_outside(added)
        released = ""
        for part, is_in_call in self._calls.split(added):
            if is_in_call:
                released += self._text_held + part
                self._text_held, self._num_exempt = "", 0
                continue
            text, is_stopped = self._release_outside(part)
            released += text
            if is_stopped:
                return released, True
        return released, False

    def _release_outside(self, added: str) -> tuple[str, bool]:
        """Do the same for text outside calls."""
        text = self._text_held + added
        if self._num_tokens_left:
            self._num_exempt = len(text)
        starts = (text.find(s, max(0, self._num_exempt - len(s) + 1)) for s in self._stop)
        found = [(at, stop) for at, stop in zip(starts, self._stop, strict=True) if at >= 0]
        if found:
            first, self.stopped_by = min(found)
            self._text_held = ""
            return text[:first], True
        num_held = max(_overlap(text, stop) for stop in self._stop)
        split = len(text) - num_held
        self._text_held = text[split:]
        self._num_exempt = max(0, self._num_exempt - split)
        return text[:split], False


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
