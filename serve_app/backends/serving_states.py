"""Whether the models can be served: what Serve's controller says about their replicas.

No replica is asked, so a question costs no token, waits for no model and wakes none that Serve has
put to sleep.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum, auto
from types import MappingProxyType
from typing import Any, Final

from serve_app.backends.single_flight import Remembered

logger = logging.getLogger(__name__)


class ServingState(StrEnum):
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


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What Serve's controller tells about a deployment.

    Attributes:
        serving: What that means for requests.
        status: Serve's own word.
        message: Serve's explanation, as of a start that has failed.
        num_replicas: The number of replicas in each of Serve's states of them.
    """

    serving: ServingState
    status: str = ""
    message: str = ""
    num_replicas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


NOT_READY: Final = frozenset({ServingState.DOWN, ServingState.FAILED})
"""The states of a model that should be awake and can't be served."""


AskStates = Callable[[], Coroutine[Any, Any, Mapping[str, DeploymentState]]]
"""Returns the state of each deployment that Serve's controller knows."""

MEMORY_S: Final = 1.0
"""How long an answer is passed on. The route needs no key, so any client may ask at any rate."""

PATIENCE_S: Final = 2.0
"""How long a question waits for the controller; it then gets the last answer."""


async def everything_runs() -> Mapping[str, DeploymentState]:
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
        self._states: Mapping[str, DeploymentState] | None = None
        self._updates = Remembered(self._update, MEMORY_S, now_s)

    async def are_ready(self) -> bool:
        """Return whether every needed deployment runs, or has no replica because of its load."""
        await self._refresh()
        return NOT_READY.isdisjoint(map(self._last, self._needed))

    async def of(self, deployment: str) -> ServingState:
        """Return a deployment's state, at most `MEMORY_S` old.

        It is the last known one if the controller is silent: replicas serve without it.
        """
        return (await self.details_of(deployment)).serving

    async def details_of(self, deployment: str) -> DeploymentState:
        """Return what the controller tells about a deployment; see `of`."""
        await self._refresh()
        return self._details(deployment)

    def _last(self, deployment: str) -> ServingState:
        return self._details(deployment).serving

    def _details(self, deployment: str) -> DeploymentState:
        if self._states is None:
            return DeploymentState(ServingState.DOWN)
        return self._states.get(deployment, DeploymentState(ServingState.RUNNING))

    async def _refresh(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._updates.result()

    async def _update(self) -> None:
        """Ask the controller; keep the last answer if it can't be asked."""
        try:
            self._states = await self._ask()
        except Exception:
            logger.warning("Serve's controller can't be asked for its replicas", exc_info=True)
