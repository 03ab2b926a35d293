"""Whether the models can be served: what Serve's controller says about their replicas.

No replica is asked, so a question costs no token, waits for no model and wakes none that Serve has
put to sleep.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Final

from serve_app.backends.single_flight import SingleFlight

logger = logging.getLogger(__name__)


class ServingState(Enum):
    """The state of a deployment."""

    RUNNING = auto()
    """A replica runs."""

    ASLEEP = auto()
    """No replica runs, and none is wanted: nobody uses the model. A request wakes it."""

    SCALING = auto()
    """No replica runs: the first one starts because of a load, or the last one stops."""

    DOWN = auto()
    """No replica runs although one should: it loads for the first time, or after a failure."""

    FAILED = auto()
    """Serve has given up on starting a replica."""


NOT_READY: Final = frozenset({ServingState.DOWN, ServingState.FAILED})
"""The states of a model that should be awake and can't be served."""


AskStates = Callable[[], Coroutine[Any, Any, Mapping[str, ServingState]]]
"""Returns the state of each deployment that Serve's controller knows."""

MEMORY_S: Final = 1.0
"""How long an answer is passed on. The route needs no key, so any client may ask at any rate."""

PATIENCE_S: Final = 2.0
"""How long a question waits for the controller; it then gets the last answer."""


async def everything_runs() -> Mapping[str, ServingState]:
    """Return no states: a deployment that the controller does not know counts as running."""
    return {}


class ServingStates:
    """The states of the deployments, as the controller has told them lately."""

    def __init__(
        self,
        ask: AskStates = everything_runs,
        needed: Collection[str] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an answer: everything counts as down.

        Args:
            ask: Asks the controller.
            needed: The deployments without which the server is not ready.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._ask = ask
        self._needed = frozenset(needed)
        self._now_s = now_s
        self._asked_s: float | None = None
        self._states: Mapping[str, ServingState] | None = None
        self._flight = SingleFlight(self._update)

    async def are_ready(self) -> bool:
        """Return whether every needed deployment runs, or has no replica because of its load."""
        await self._refresh()
        return NOT_READY.isdisjoint(map(self._last, self._needed))

    async def of(self, deployment: str) -> ServingState:
        """Return a deployment's state, at most `MEMORY_S` old.

        It is the last known one if the controller is silent: replicas serve without it.
        """
        await self._refresh()
        return self._last(deployment)

    def _last(self, deployment: str) -> ServingState:
        if self._states is None:
            return ServingState.DOWN
        return self._states.get(deployment, ServingState.RUNNING)

    async def _refresh(self) -> None:
        if self._asked_s is None or self._now_s() - self._asked_s >= MEMORY_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._flight.result()

    async def _update(self) -> None:
        try:
            self._states = await self._ask()
        except Exception:
            logger.warning("Serve's controller can't be asked for its replicas", exc_info=True)
        self._asked_s = self._now_s()
