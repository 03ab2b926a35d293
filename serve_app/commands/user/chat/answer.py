"""An answer while it comes: its text, its notices and its times."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Protocol

from serve_app.client.chat_client import Delta, Notice, Usage
from serve_app.http import stream_notices

LEAST_S: Final = 0.02
"""A shorter time between the first token and the last says nothing about the speed."""


class Screen(Protocol):
    """Shows an answer while it comes."""

    def add(self, text: str, *, is_reasoning: bool) -> None:
        """Show more of the text."""
        ...

    def notice(self, text: str) -> None:
        """Show what the server tells meanwhile."""
        ...


@dataclass
class Answer:
    """What has come so far.

    Attributes:
        text: The answer's text, without reasoning.
        finish_reason: Why it ended.
        usage: Its tokens; None if the server does not count them.
        num_moves: How often another replica has taken over.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    num_moves: int = 0
    now_s: Callable[[], float] = time.monotonic
    _asked_s: float = 0.0
    _first_s: float | None = None
    _first_tokens: int = 1
    _last_s: float = 0.0

    async def read(self, stream: AsyncGenerator[Delta | Notice, None], screen: Screen) -> None:
        """Take all that a stream brings, and show it.

        Raises:
            ChatError: It was refused, or broke off; what has come so far stays.
        """
        self._asked_s = self.now_s()
        async with aclosing(stream):
            async for each in stream:
                if isinstance(each, Notice):
                    self.num_moves += each.text == stream_notices.Notice.MOVED
                    screen.notice(each.text)
                else:
                    self._gain(each, screen)

    def _gain(self, delta: Delta, screen: Screen) -> None:
        if delta.text or delta.reasoning:
            self._last_s = self.now_s()
            if self._first_s is None:
                self._first_s = self._last_s
                if delta.usage is not None:
                    self._first_tokens = delta.usage.completion_tokens
            self.text += delta.text
            for text, is_reasoning in ((delta.reasoning, True), (delta.text, False)):
                if text:
                    screen.add(text, is_reasoning=is_reasoning)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage

    def figures(self) -> str:
        """Return its times and counts in a line; empty if nothing has come."""
        if self._first_s is None:
            return ""
        parts = [f"first token after {(self._first_s - self._asked_s) * 1000:.0f} ms"]
        if self.usage is not None:
            parts.append(f"{self.usage.completion_tokens} tokens{self._rate(self.usage)}")
        if self.finish_reason == "length":
            parts.append("cut by its length limit")
        if self.num_moves:
            parts.append("moved to another replica" + _times(self.num_moves))
        return ", ".join(parts)

    def _rate(self, usage: Usage) -> str:
        """Return the tokens a second after the first ones; nothing if all came together."""
        assert self._first_s is not None
        seconds, tokens = self._last_s - self._first_s, usage.completion_tokens - self._first_tokens
        return f" at {tokens / seconds:,.0f} a second" if seconds >= LEAST_S and tokens > 0 else ""


def _times(num: int) -> str:
    return f" {num} times" if num > 1 else ""
