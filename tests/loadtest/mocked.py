"""A mock server and a sender in the test's own event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from yarl import URL

from loadtest.apis.openai import OpenAiChat
from loadtest.client.attempt import Task
from loadtest.client.contract import Api, BodySettings, Call
from loadtest.client.sender import Sender, Target
from loadtest.client.stamped_http import stamped_session
from loadtest.client.watchdog import TimeLimits
from loadtest.mock.script import Behaviour, Script
from loadtest.mock.server import MockServer, serving
from loadtest.results.record import RequestRecord

CHAT = "/v1/chat/completions"


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, by polling."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process may make it true
            await asyncio.sleep(0.001)


def chat_api() -> OpenAiChat:
    return OpenAiChat(BodySettings(), {})


@dataclass
class Noting:
    """An observer that keeps the events it receives."""

    seen: list[str] = field(default_factory=list)
    ttfts_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def level_started(
        self, title: str, now_s: float, *, num_requests: int | None, duration_s: float | None
    ) -> None:
        self.seen.append(f"level {title} {num_requests} {duration_s}")

    def started(self, now_s: float) -> None:
        self.seen.append("started")

    def content(self, now_s: float, num_tokens: int | None, ttft_ms: float | None) -> None:
        self.num_tokens += 1 if num_tokens is None else num_tokens
        if ttft_ms is not None:
            self.ttfts_ms.append(ttft_ms)

    def ended(self, record: RequestRecord) -> None:
        self.seen.append(f"ended {record.error}")


@dataclass
class Aim:
    """A sender whose target is a mock."""

    sender: Sender
    server: MockServer
    observer: Noting
    port: int

    async def send(self, index: int = 0, call: Call | None = None) -> RequestRecord:
        return await self.sender.send(Task(0, index, 0, call or Call("What is a list?"), queue=0))


@asynccontextmanager
async def aimed(
    *behaviours: Behaviour,
    path: str = CHAT,
    api: Api | None = None,
    limits: TimeLimits | None = None,
    secrets: tuple[str, ...] = (),
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Aim]:
    """Serve these behaviours, and yield a sender to them."""
    server = MockServer(Script(*behaviours), keeps_requests=True)
    observer = Noting()
    async with serving(server, "127.0.0.1", 0) as port, stamped_session(time.monotonic) as session:
        target = Target(URL(f"http://127.0.0.1:{port}{path}"), headers or {}, secrets)
        sender = Sender(
            session, target, api or chat_api(), limits or TimeLimits(), time.monotonic, observer
        )
        yield Aim(sender, server, observer, port)
