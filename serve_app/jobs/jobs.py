"""The files and batches of a server, as its surfaces and its runner of batches share them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Self

from serve_app.config import JobsConfig
from serve_app.jobs.batches import Batches
from serve_app.jobs.files import Files
from serve_app.jobs.results import Results
from serve_app.jobs.store import Store


class Jobs:
    """What is kept on disk.

    Attributes:
        config: Its bounds.
        store: Where it lies.
        files: The files.
        batches: The batches.
        results: The results of their lines.
    """

    def __init__(self, config: JobsConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.files = Files(store, config)
        self.batches = Batches(store, config)
        self.results = Results(store, config)
        self._news = asyncio.Event()

    @classmethod
    def of(cls, config: JobsConfig, unix_s: Callable[[], float]) -> Self | None:
        """Return the jobs of a configuration; None if it names no folder."""
        return None if config.folder is None else cls(config, Store(Path(config.folder), unix_s))

    def announce(self) -> None:
        """Wake the runner of this process: a batch was created or cancelled."""
        self._news.set()

    async def wait(self, most_s: float) -> None:
        """Return when there is news, or after some seconds."""
        try:
            async with asyncio.timeout(most_s):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()
