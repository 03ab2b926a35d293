"""The demo's streams: what is asked, what comes, where a stream paused, and whether it is equal."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

from serve_app.client.chat_client import Delta, Notice, Usage
from serve_app.commands.user.demo.server import MODEL
from serve_app.http import stream_notices

NUM_TOKENS: Final = 1900
"""Of each answer, unless its schema ends it: some seconds on a laptop. The model takes 2048."""

UNDER_WAY: Final = NUM_TOKENS // 4
"""The tokens that each stream has before a replica is killed."""

COUNTED: Final = {"include_usage": True, "continuous_usage_stats": True}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and how its answer is sampled."""

    text: str
    how: str
    sampling: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        """Return the request."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": NUM_TOKENS,
            "stream_options": COUNTED,
            **self.sampling,
        }

    def with_priority(self, priority: int) -> "Question":
        """Return the same question, to be answered with a priority."""
        return replace(self, sampling={**self.sampling, "priority": priority})


CALL: Final = {
    "type": "object",
    "properties": {
        "function": {"enum": ["os.walk", "json.loads", "shutil.copy", "re.sub", "glob.glob"]},
        "returns": {"enum": ["str", "int", "dict", "list", "None"]},
        "calls": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["function", "returns", "calls"],
}
CALLS: Final = {"type": "array", "minItems": 200, "items": CALL}
JSON_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "calls", "schema": CALLS}}

# The model would end after a docstring, so two answers must be longer.
QUESTIONS: Final = (
    Question(
        "What does os.path.join do?",
        "greedy, repetition penalty",
        {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": NUM_TOKENS},
    ),
    Question(
        "Explain textwrap.dedent.",
        "temperature 0.7, seed 7",
        {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.1, "min_tokens": NUM_TOKENS},
    ),
    Question(
        "What is shutil.copy for?",
        "JSON schema, seed 8",
        {"temperature": 1, "seed": 8, "response_format": JSON_SCHEMA},
    ),
)

BATCH: Final = replace(QUESTIONS[0], how="batch, priority 5").with_priority(5)
CHAT: Final = replace(QUESTIONS[1], how="chat, priority 0").with_priority(0)


@dataclass(frozen=True, slots=True)
class Pause:
    """Where a stream paused.

    Attributes:
        position: How many characters had come.
        num_tokens: How many tokens had come.
        seconds: From the last token before to the first one after.
        notice: Why: its replica was lost (moved), or others ran first (parked).
    """

    position: int
    num_tokens: int
    seconds: float
    notice: str = stream_notices.Notice.MOVED


@dataclass
class DemoStream:
    """What has come of an answer.

    Attributes:
        question: What was asked.
        answer_id: The answer's id; empty until its first chunk.
        text: Its text.
        usage: Its tokens so far.
        finish_reason: Why it ended; None until then.
        pauses: Where it paused.
        under_way: Set once it has UNDER_WAY tokens, or has ended with fewer.
    """

    question: Question
    answer_id: str = ""
    text: str = ""
    usage: Usage | None = None
    finish_reason: str | None = None
    pauses: list[Pause] = field(default_factory=list)
    under_way: asyncio.Event = field(default_factory=asyncio.Event)
    now_s: Callable[[], float] = time.monotonic
    _last_s: float = 0.0
    _notice: str = ""

    @property
    def num_tokens(self) -> int:
        """How many tokens have come."""
        return 0 if self.usage is None else self.usage.completion_tokens

    async def read(self, stream: AsyncGenerator[Delta | Notice, None]) -> None:
        """Take all that comes.

        Raises:
            ChatError: It was refused, or broke off.
        """
        self._last_s = self.now_s()
        async with aclosing(stream):
            async for each in stream:
                if isinstance(each, Delta):
                    self._gain(each)
                elif each.text in (stream_notices.Notice.MOVED, stream_notices.Notice.PARKED):
                    self._notice = each.text

    def _gain(self, delta: Delta) -> None:
        now_s = self.now_s()
        if self._notice and delta.text:
            paused_s = now_s - self._last_s
            self.pauses.append(Pause(len(self.text), self.num_tokens, paused_s, self._notice))
            self._notice = ""
        self._last_s = now_s
        self.answer_id = delta.answer_id
        self.text += delta.text
        self.usage = delta.usage or self.usage
        self.finish_reason = delta.finish_reason or self.finish_reason
        if self.num_tokens >= UNDER_WAY or self.finish_reason:
            self.under_way.set()

    def summary(self) -> str:
        """Return its id, its length and its pauses in a line."""
        pauses = "".join(
            f", {each.notice} after {each.num_tokens} tokens with a pause of {each.seconds:.2f} s"
            for each in self.pauses
        )
        return f"{self.question.how}: {self.answer_id}, {self.num_tokens} tokens{pauses}"

    def is_equal(self, undisturbed: "DemoStream") -> bool:
        """Return whether text, counts and end are those of another stream."""
        mine = (self.text, self.usage, self.finish_reason)
        return mine == (undisturbed.text, undisturbed.usage, undisturbed.finish_reason)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison of disturbed with undisturbed streams gives.

    Attributes:
        num_streams: How many were compared.
        num_equal: How many are equal.
        num_lost_tokens: How many tokens the others have less.
        num_paused: How many have moved, or were parked.
        without_pause: What it means if none has.
    """

    num_streams: int
    num_equal: int
    num_lost_tokens: int
    num_paused: int
    without_pause: str = "no stream was on the killed replica"

    @classmethod
    def of(
        cls,
        streams: Sequence[DemoStream],
        undisturbed: Sequence[DemoStream],
        without_pause: str = without_pause,
    ) -> "Verdict":
        """Compare."""
        pairs = list(zip(streams, undisturbed, strict=True))
        return cls(
            num_streams=len(pairs),
            num_equal=sum(stream.is_equal(other) for stream, other in pairs),
            num_lost_tokens=sum(max(0, other.num_tokens - own.num_tokens) for own, other in pairs),
            num_paused=sum(bool(stream.pauses) for stream in streams),
            without_pause=without_pause,
        )

    @property
    def is_proof(self) -> bool:
        """Whether streams have paused, and all are equal."""
        return self.num_paused > 0 and self.num_equal == self.num_streams

    def text(self) -> str:
        """Return the last line of the demo."""
        told = f"{self.num_equal} of {self.num_streams} equal, {self.num_lost_tokens} tokens lost"
        if not self.num_paused:
            told += f"; but {self.without_pause}, so this shows nothing"
        return told
