"""A replica of vLLM that writes down what it does, and that stops sequences after chosen tokens.

The id of a request says where: `stop-at-7-...` gives its clients seven tokens of each answer, and
no more, until the request moves to another replica or its id is released. So a test may harm the
replica while exactly so many tokens are delivered. `stopped/` then holds a file for each sequence.
"""

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.contract.output import FinishReason, TextDelta
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.text_engine import Take
from deployments.vllm_generator import VllmGenerator
from tests.faults.served.fragile_generator import REPORT_INTERVAL_S, Watched
from tests.faults.served.replicas import RELEASED, STOPPED

if TYPE_CHECKING:
    from deployments.vllm_engine.engine import VllmEngine

_STOP = re.compile(r"(stop-at-(\d+)-\w+)-")


class FragileVllm(Watched, VllmGenerator):
    """A replica of vLLM's engine."""

    def _open_engine(self) -> "VllmEngine":
        engine = super()._open_engine()
        run = engine.running

        @contextmanager
        def running(sequence: SequenceRequest, take: Take) -> Iterator[None]:
            found = _STOP.match(sequence.sequence_id)
            if found is None or sequence.is_resumed:
                with run(sequence, take):
                    yield
                return
            name = f"{os.getpid()}-{sequence.sequence_id}"
            stopped = _Stopped(take, int(found[2]), self._folder / STOPPED / name)
            letting_go = asyncio.ensure_future(self._let_go(found[1], stopped))
            try:
                with run(sequence, stopped.take_or_keep):
                    yield
            finally:
                letting_go.cancel()

        engine.running = running  # type: ignore[method-assign] # a fault
        return engine

    async def _let_go(self, name: str, stopped: "_Stopped") -> None:
        """Hand on what was kept once a test has released the name."""
        while not (self._folder / RELEASED / name).exists():  # noqa: ASYNC110 - a test's file
            await asyncio.sleep(REPORT_INTERVAL_S)
        stopped.let_go()
        self._channels.flush()


@dataclass
class _Stopped:
    """A sequence whose deltas are kept once it has delivered its tokens."""

    take: Take
    num_left: int  # tokens until it stops
    told: Path  # exists once it has stopped
    kept: list[TextDelta] = field(default_factory=list)

    def take_or_keep(self, delta: TextDelta) -> None:
        """Take a delta that belongs to the first tokens, or that ends a failed sequence."""
        if delta.finish_reason is FinishReason.ABORT:
            self.kept.clear()
            self.take(delta)
        elif self.num_left <= 0:
            self.kept.append(delta)
            self.told.touch()
        else:
            self.num_left -= len(delta.token_ids)
            self.take(delta)

    def let_go(self) -> None:
        """Take what was kept, and all that follows."""
        kept, self.kept = self.kept, []
        self.num_left = 2**31
        for delta in kept:
            self.take(delta)
