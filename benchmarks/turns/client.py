"""Clients that ask one model after the other, and what each of their answers had to wait for."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ORDER = "ABAAC"
"""The models that a client asks, again and again; each client begins at another one."""

LENGTHS = (32, 1500, 3500, 3500)
"""Tokens of answers: turns end while long ones run, and while short ones are asked for."""

NUM_QUESTIONS = 8
"""Of each model. Half of the answers are sampled."""

NUM_WORDS = 30


@dataclass(frozen=True, slots=True)
class Question:
    """What a model is asked; the answer is always the same."""

    model: str
    number: int

    def body(self) -> dict[str, object]:
        """Return the body of the streamed request."""
        drawing = random.Random(f"{self.model} {self.number}")
        words = (drawing.choice("aeiou") + drawing.choice("bdgmnrst") for _ in range(NUM_WORDS))
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "temperature": self.number // len(LENGTHS) % 2,
            "seed": self.number,
            "max_tokens": LENGTHS[self.number % len(LENGTHS)],
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which an answer did not go on.

    Attributes:
        model: Whose answer it is.
        began_s: When the request was sent, or its stream was parked.
        ended_s: When the next token came, or the answer ended.
        is_parked: Whether the answer had begun.
    """

    model: str
    began_s: float
    ended_s: float
    is_parked: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Answer:
    """A streamed answer as it arrived; times are of `time.perf_counter`.

    Attributes:
        question: What was asked.
        sent_s: When.
        status: The HTTP status; None if none came.
        lines: The lines of events and comments, each with its time.
        ended_s: When the connection was closed; None before.
    """

    question: Question
    sent_s: float
    status: int | None = None
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should."""
        return self.status == 200 and any(line == b"data: [DONE]\n" for _, line in self.lines)

    @property
    def text(self) -> str:
        """The text that has come."""
        found = []
        for _, message in self._messages():
            match message:
                case {"choices": [{"delta": {"content": str(text)}}]}:
                    found.append(text)
        return "".join(found)

    @property
    def token_times_s(self) -> list[float]:
        """When tokens came."""
        found, num_before = [], 0
        for time_s, message in self._messages():
            match message:
                case {"usage": {"completion_tokens": int(number)}} if number > num_before:
                    found.append(time_s)
                    num_before = number
        return found

    def waits(self) -> list[Wait]:
        """Return the times in which it waited: for its first token, and each time parked."""
        tokens, end_s = self.token_times_s, self.ended_s
        assert end_s is not None, "the answer has ended"
        found: list[Wait] = []
        parked = [time_s for time_s, line in self.lines if line == b": parked\n"]
        for began_s in (self.sent_s, *parked):
            next_s = next((time_s for time_s in tokens if time_s >= began_s), end_s)
            if not found or found[-1].ended_s < next_s:  # a notice may be repeated
                found.append(Wait(self.question.model, began_s, next_s, began_s != self.sent_s))
        return found

    def _messages(self) -> Iterator[tuple[float, object]]:
        for time_s, line in self.lines:
            if line.startswith(b"data: {"):
                yield time_s, json.loads(line.removeprefix(b"data: "))


class Clients:
    """Clients of one server; they share its machine, so lines are only read after the run."""

    def __init__(self, port: int) -> None:
        """Start without answers.

        Args:
            port: The server's.
        """
        self.answers: list[Answer] = []
        self._port = port

    async def ask_for(self, seconds: float, num_clients: int, models: Sequence[str]) -> None:
        """Let clients ask for some seconds, each as soon as its last answer has ended.

        What has been asked by then is answered to its end.

        Args:
            seconds: How long they ask.
            num_clients: How many there are.
            models: What `ORDER` stands for.
        """
        until_s = time.perf_counter() + seconds
        numbers = dict.fromkeys(models, 0)

        async def ask_on(client: int) -> None:
            at = client
            while time.perf_counter() < until_s:
                model = models["ABC".index(ORDER[at % len(ORDER)])]
                numbers[model] += 1
                at += 1
                await self.ask(Question(model, numbers[model] % NUM_QUESTIONS))

        async with asyncio.TaskGroup() as group:
            for client in range(num_clients):
                group.create_task(ask_on(client))

    async def ask_alone(self, models: Sequence[str]) -> None:
        """Ask each model all questions at once, while nothing is asked of another."""
        for model in models:
            questions = [Question(model, number) for number in range(NUM_QUESTIONS)]
            await asyncio.gather(*map(self.ask, questions))

    async def ask(self, question: Question) -> Answer:
        """Send a request, and keep its answer."""
        body = json.dumps(question.body())
        answer = Answer(question, time.perf_counter())
        self.answers.append(answer)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                (
                    "POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
                ).encode()
            )
            answer.status = int((await reader.readline()).split()[1])
            while line := await reader.readline():
                if line.startswith((b"data: ", b": ")):
                    answer.lines.append((time.perf_counter(), line))
        finally:
            writer.close()
            answer.ended_s = time.perf_counter()
        return answer
