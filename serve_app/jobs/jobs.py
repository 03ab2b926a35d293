"""What a server keeps on disk, as its surfaces and its runners share it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

from serve_app.config import JobsConfig
from serve_app.jobs.batches import Batches
from serve_app.jobs.files import Files
from serve_app.jobs.response_log import ResponseLog
from serve_app.jobs.responses import Responses
from serve_app.jobs.results import Results
from serve_app.jobs.store import Store


class News:
    """Wakes a runner of this process, so that it need not wait for its next look at the store."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def announce(self) -> None:
        """Wake it."""
        self._told.set()

    async def wait(self, most_s: float) -> None:
        """Return when there is news, or after some seconds."""
        try:
            async with asyncio.timeout(most_s):
                await self._told.wait()
        except TimeoutError:
            return
        self._told.clear()


class Jobs:
    """What is kept on disk.

    Attributes:
        config: Its bounds.
        store: Where it lies.
        files: The files.
        batches: The batches.
        results: The results of their lines.
        responses: The stored responses.
        response_log: The events of those in the background.
        response_news: A response in the background was created, cancelled or deleted.
    """

    def __init__(self, config: JobsConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.files = Files(store, config)
        self.batches = Batches(store, config)
        self.results = Results(store, config)
        self.responses = Responses(store, config)
        self.response_log = ResponseLog(store)
        self.response_news = News()
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
