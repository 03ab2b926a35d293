"""Whether the models can be served: what Serve's controller says about their replicas.

No replica is asked, so a question costs no token, waits for no model and wakes none that Serve has
put to sleep.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, Final

from serve_app.backends.single_flight import SingleFlight

logger = logging.getLogger(__name__)

AskWhatIsDown = Callable[[], Coroutine[Any, Any, Collection[str]]]
"""Returns the deployments that should serve now and have no running replica."""

MEMORY_S: Final = 1.0
"""How long an answer is passed on. The route needs no key, so any client may ask at any rate."""

PATIENCE_S: Final = 2.0
"""How long a question waits for the controller; it then gets the last answer."""


async def nothing_is_down() -> Collection[str]:
    """Return no deployments: without Serve there are none."""
    return ()


class Readiness:
    """Says whether every model that should be awake has a replica that runs."""

    def __init__(
        self,
        ask: AskWhatIsDown,
        needed: Collection[str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an answer, which means: not ready.

        Args:
            ask: Asks the controller. It may raise or take any time.
            needed: The models' deployments.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._ask = ask
        self._needed = frozenset(needed)
        self._now_s = now_s
        self._asked_s: float | None = None
        self._is_ready = False
        self._flight = SingleFlight(self._update)

    async def is_ready(self) -> bool:
        """Return the state, at most `MEMORY_S` old, or the last known if the controller is silent.

        Replicas serve without the controller, so its silence changes nothing.
        """
        if self._asked_s is None or self._now_s() - self._asked_s >= MEMORY_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._flight.result()
        return self._is_ready

    async def _update(self) -> None:
        try:
            down = await self._ask()
        except Exception:
            logger.warning("Serve's controller can't be asked for its replicas", exc_info=True)
        else:
            self._is_ready = self._needed.isdisjoint(down)
        self._asked_s = self._now_s()
