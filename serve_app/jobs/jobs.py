"""What a server keeps on disk, as its surfaces and its runners share it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from deployments.contract.errors import JobsUnavailableError
from serve_app.config import JobsConfig
from serve_app.jobs.batches import Batches
from serve_app.jobs.conversations import Conversations
from serve_app.jobs.files import Files
from serve_app.jobs.response_log import ResponseLog
from serve_app.jobs.responses import Responses
from serve_app.jobs.results import Results
from serve_app.jobs.store import Store

logger = logging.getLogger("ray.serve")


class News:
    """Wakes a task of this process, so that it need not wait for its next look at the store."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def announce(self) -> None:
        """Wake it."""
        self._told.set()

    async def wait(self, most_s: float) -> bool:
        """Return True when there is news, or False after some seconds."""
        try:
            async with asyncio.timeout(most_s):
                await self._told.wait()
        except TimeoutError:
            return False
        self._told.clear()
        return True


class ResponseNews:
    """Wakes those who wait for responses in the background.

    Attributes:
        of_runner: One was created, cancelled or deleted.
    """

    def __init__(self) -> None:
        self.of_runner = News()
        self._of_readers: dict[str, set[News]] = {}

    @contextmanager
    def of_log(self, id_: str) -> Iterator[News]:
        """Give a reader the news of a response's log, as long as this process writes it."""
        news = News()
        readers = self._of_readers.setdefault(id_, set())
        readers.add(news)
        try:
            yield news
        finally:
            readers.remove(news)
            if not readers:
                del self._of_readers[id_]

    def logged(self, id_: str) -> None:
        """Wake the readers of a response's log."""
        for news in self._of_readers.get(id_, ()):
            news.announce()

    def changed(self, id_: str) -> None:
        """Wake the runner and the readers: a response was created, cancelled or deleted."""
        self.of_runner.announce()
        self.logged(id_)


class Jobs:
    """What is kept on disk.

    Attributes:
        config: Its bounds.
        store: Where it lies.
        files: The files.
        batches: The batches.
        results: The results of their lines.
        responses: The stored responses.
        conversations: The conversations that they make.
        response_log: The events of those in the background.
        response_news: Wakes those who wait for responses in the background.
    """

    def __init__(self, config: JobsConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.files = Files(store, config)
        self.batches = Batches(store, config)
        self.results = Results(store, config)
        self.responses = Responses(store, config)
        self.conversations = Conversations(store)
        self.response_log = ResponseLog(store)
        self.response_news = ResponseNews()
        self._news = News()

    @classmethod
    def of(cls, config: JobsConfig, unix_s: Callable[[], float]) -> Self | None:
        """Return the jobs of a configuration; None if it names no folder."""
        return None if config.folder is None else cls(config, Store(Path(config.folder), unix_s))

    def announce(self) -> None:
        """Wake the runner of batches: one was created or cancelled."""
        self._news.announce()

    async def wait(self, most_s: float) -> None:
        """Return when there is news of batches, or after some seconds."""
        await self._news.wait(most_s)


async def again_and_again(
    jobs: str,
    work: Callable[[], Awaitable[None]],
    wait: Callable[[float], Awaitable[object]],
    most_s: float,
) -> None:
    """Do a part of a runner's work again and again, whatever fails.

    Args:
        jobs: What the runner runs, for the log.
        work: The part of its work.
        wait: Returns when it is due again, or after some seconds.
        most_s: These seconds.
    """
    while True:
        try:
            await work()
        except JobsUnavailableError:
            pass  # the store has logged it
        except Exception:  # the next time may succeed, and nothing else runs the jobs here
            logger.exception("the runner of %s has failed, and goes on", jobs)
        await wait(most_s)
