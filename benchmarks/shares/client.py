"""Sends streamed requests of several keys to one server, and keeps what came back and when."""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.serving.timed_answer import TimedAnswer
from benchmarks.shares.server import MODEL, secret_of

NUM_TOKENS = 64
REFUSED_PAUSE_S = 1.0
"""Seconds from a refusal to the next request: without a pause, refusals keep the server busy."""


@dataclass(kw_only=True, slots=True)
class Answer(TimedAnswer):
    """A streamed answer as it arrived.

    Attributes:
        key: Its request's key.
        name: What was asked for.
    """

    key: str
    name: str

    @property
    def is_refused(self) -> bool:
        """Whether the server answered with an error."""
        return self.status not in (200, None)

    def ttft_s(self, end_s: float) -> float:
        """Return the time to the first token.

        Args:
            end_s: When the run ended. Without a token by then, the time is at least the one from
                sending to the end, and is counted as that.

        Returns:
            Seconds; infinite if the server ended the answer without a token.
        """
        first_s = next((time_s for time_s, _ in self.tokens()), None)
        if first_s is not None:
            return first_s - self.sent_s
        return end_s - self.sent_s if self.ended_s is None else float("inf")


class Client:
    """Sends requests of keys to one server; keeps all answers."""

    def __init__(self, port: int, words: Sequence[str], run: str) -> None:
        """Start without answers.

        Args:
            port: The server's.
            words: What prompts are made of.
            run: Chooses the prompts, with the key and the request's name. Runs on one server need
                names of their own: the later one would find its prompts in the prefix cache.
        """
        self.answers: list[Answer] = []
        self._port = port
        self._words = words
        self._run = run

    @property
    def url(self) -> str:
        """The server's."""
        return f"http://127.0.0.1:{self._port}"

    def prompt(self, key: str, name: str) -> str:
        """Return a request's prompt, which no other key and no other run has."""
        chosen = random.Random(f"{self._run} {key} {name}").choices(self._words, k=50)
        return "".join(chosen).strip()

    def body(self, key: str, name: str, *, num_tokens: int) -> dict[str, object]:
        """Return the body of a request that is not streamed; see `ask`."""
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.prompt(key, name)}],
            "temperature": 0,
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }

    async def ask(
        self, key: str, name: str, *, num_tokens: int = NUM_TOKENS, priority: int = 0
    ) -> Answer:
        """Send a request and return its answer; one that is cut short is kept, too.

        Args:
            key: Its key.
            name: Chooses its prompt, with the key and the run.
            num_tokens: Tokens of the answer.
            priority: Its priority.
        """
        body = {**self.body(key, name, num_tokens=num_tokens), "priority": priority}
        answer = Answer(key=key, name=name)
        self.answers.append(answer)
        await answer.receive(self._port, body, f"Authorization: Bearer {secret_of(key)}")
        return answer

    async def ask_for_ever(self, key: str, name: str, **options: int) -> None:
        """Send a request as soon as the answer to the last has ended; wait after a refusal."""
        for number in range(sys.maxsize):
            answer = await self.ask(key, f"{name} {number}", **options)
            if answer.is_refused:
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def ask_at_a_rate(self, key: str, rate: float, **options: int) -> None:
        """Send requests at a steady rate, whatever becomes of them."""
        async with asyncio.TaskGroup() as group:
            for number in range(sys.maxsize):
                group.create_task(self.ask(key, str(number), **options))
                await asyncio.sleep(1 / rate)

    async def ask_all(
        self, key: str, names: Iterable[str], num_at_once: int, **options: int
    ) -> None:
        """Send a request for each name, as many at once as given."""
        left = iter(names)

        async def ask_next() -> None:
            for name in left:
                await self.ask(key, name, **options)

        await asyncio.gather(*(ask_next() for _ in range(num_at_once)))

    def of(self, key: str) -> list[Answer]:
        """Return the answers to a key's requests."""
        return [answer for answer in self.answers if answer.key == key]

    def tokens_by_key(self, since_s: float, until_s: float) -> Counter[str]:
        """Return the tokens that came between two times."""
        found: Counter[str] = Counter()
        for answer in self.answers:
            for time_s, num_tokens in answer.tokens():
                if since_s <= time_s < until_s:
                    found[answer.key] += num_tokens
        return found


def run_for(seconds: float, works: Iterable[Coroutine[None, None, None]]) -> tuple[float, float]:
    """Run works for some seconds, then cut them short; return when they began and were cut."""

    async def run() -> tuple[float, float]:
        began_s = time.perf_counter()
        tasks = [asyncio.create_task(work) for work in works]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        end_s = time.perf_counter()
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return began_s, end_s

    return uvloop.run(run())
