"""Clients that ask one model after the other, and what each of their answers had to wait for."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.timed_answer import TimedAnswer

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
        """Return the body of the request."""
        drawing = random.Random(f"{self.model} {self.number}")
        words = (drawing.choice("aeiou") + drawing.choice("bdgmnrst") for _ in range(NUM_WORDS))
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "temperature": self.number // len(LENGTHS) % 2,
            "seed": self.number,
            "max_tokens": LENGTHS[self.number % len(LENGTHS)],
            "ignore_eos": True,
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


@dataclass(kw_only=True, slots=True)
class Answer(TimedAnswer):
    """A streamed answer as it arrived.

    Attributes:
        question: What was asked.
    """

    question: Question

    def waits(self) -> list[Wait]:
        """Return the times in which it waited: for its first token, and each time parked."""
        tokens, end_s = [time_s for time_s, _ in self.tokens()], self.ended_s
        assert end_s is not None, "the answer has ended"
        found: list[Wait] = []
        parked = [time_s for time_s, line in self.lines if line == b": parked\n"]
        for began_s in (self.sent_s, *parked):
            next_s = next((time_s for time_s in tokens if time_s >= began_s), end_s)
            if not found or found[-1].ended_s < next_s:  # a notice may be repeated
                found.append(Wait(self.question.model, began_s, next_s, began_s != self.sent_s))
        return found


class Clients:
    """Clients of one server."""

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
        answer = Answer(question=question)
        self.answers.append(answer)
        await answer.receive(self._port, question.body())
        return answer
