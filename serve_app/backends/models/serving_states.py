"""Whether the models can be served: what Serve's controller says about their replicas.

No replica is asked, so a question costs no token, waits for no model and wakes none that Serve has
put to sleep. Whether replicas answer, `devices` finds out.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum, auto
from types import MappingProxyType
from typing import Any, Final

from serve_app.backends.models.single_flight import Remembered

logger = logging.getLogger(__name__)


class ServingState(StrEnum):
    """The state of a deployment."""

    RUNNING = auto()
    """A replica runs."""

    ASLEEP = auto()
    """No replica runs, and none is wanted: nobody uses the model. A request wakes it.

    Clients are told the same of a model whose replicas all sleep lightly, which the controller does
    not know (`ModelDevices.serving`).
    """

    SCALING = auto()
    """No replica runs: the first one starts because of a load, or the last one stops."""

    DOWN = auto()
    """No replica runs although one should: it loads for the first time, or after a failure."""

    FAILED = auto()
    """No replica runs, and none will before another deploy: Serve could not start one."""


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What Serve's controller tells about a deployment.

    Attributes:
        serving: What that means for requests.
        status: Serve's own word. `DEPLOY_FAILED` also if the whole file could not be deployed.
        message: Serve's explanation, as of a start that has failed.
        num_replicas: The number of replicas in each of Serve's states of them.
        concerns_file: Whether the message is about the whole file, and not about this deployment.
        is_pinned: Whether an operator wants a replica to run in any case.
        is_going_to_sleep: Whether an operator wants the replicas to end once they have nothing to
            do.
    """

    serving: ServingState
    status: str = ""
    message: str = ""
    num_replicas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    concerns_file: bool = False
    is_pinned: bool = False
    is_going_to_sleep: bool = False

    @property
    def failure(self) -> str | None:
        """Why the latest deploy or start has failed, in one line; None if it has not.

        Replicas of an earlier deploy may serve all the same.
        """
        has_failed = self.serving is ServingState.FAILED or self.status == DEPLOY_FAILED
        return reason_in(self.message) if has_failed else None


DEPLOY_FAILED: Final = "DEPLOY_FAILED"
"""Serve's word for a deploy that it has given up."""

NOT_READY: Final = frozenset({ServingState.DOWN, ServingState.FAILED})
"""The states of a model that should be awake and can't be served."""


AskStates = Callable[[], Coroutine[Any, Any, Mapping[str, DeploymentState]]]
"""Returns the state of each deployment that Serve's controller knows."""

MEMORY_S: Final = 1.0
"""How long an answer is passed on. The route needs no key, so any client may ask at any rate."""

PATIENCE_S: Final = 2.0
"""How long a question waits for the controller; it then gets the last answer."""


_NO_ERROR: Final = re.compile(r"^Deploying app '.*' failed with exception:$", re.MULTILINE)
"""What Serve puts before the error of a builder."""

_FRAME: Final = re.compile(r'^  File ".*(?:\n    .*)*\n?', re.MULTILINE)
"""A frame of a traceback, after the last of which the error stands."""

_EXCEPTION_CLASS: Final = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): (?=.*\s)")
"""The class before a sentence; before a bare word, such as a KeyError's, it says more than that."""

_PYDANTIC_ERROR: Final = re.compile(
    r"^(?P<path>\S.*)\n  (?:Value error, )?(?P<why>.*) \[type=\w+, input_value=.*\]$", re.MULTILINE
)


def reason_in(message: str) -> str:
    """Return the error at the end of Serve's message, after a traceback, in one line.

    Its class is left out where the error is a sentence. Pydantic's errors, which end with links,
    are joined, each with its path.
    """
    if invalid := list(_PYDANTIC_ERROR.finditer(message)):
        return "; ".join(f"{each['path']}: {each['why']}" for each in invalid)
    error = " ".join(_FRAME.split(_NO_ERROR.sub("", message))[-1].split())
    return _EXCEPTION_CLASS.sub("", error) or "Serve does not say why"


class ServingStates:
    """The states of the deployments, as the controller has told them lately."""

    def __init__(
        self,
        ask: AskStates | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an answer: everything counts as down.

        Args:
            ask: Asks the controller, which names every deployment; None means that all run.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._ask = ask
        self._states: Mapping[str, DeploymentState] = {}
        self._updates = Remembered(self._update, MEMORY_S, now_s)

    async def of(self, deployment: str) -> DeploymentState:
        """Return what the controller tells about a deployment, at most `MEMORY_S` old.

        It is the last known state if the controller is silent: replicas serve without it. A
        deployment that it does not know is down: no news is no replica.
        """
        return await self._after(self._updates.result, deployment)

    async def newest_of(self, deployment: str) -> DeploymentState:
        """Return what the controller tells now; see `of`."""
        return await self._after(self._updates.next_result, deployment)

    async def _after(
        self, update: Callable[[], Coroutine[Any, Any, None]], deployment: str
    ) -> DeploymentState:
        if self._ask is None:
            return DeploymentState(ServingState.RUNNING)
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await update()
        return self._states.get(deployment, DeploymentState(ServingState.DOWN))

    async def _update(self) -> None:
        """Ask the controller; keep the last answer if it can't be asked."""
        assert self._ask is not None, "there is something to ask"
        try:
            self._states = await self._ask()
        except Exception:
            logger.warning("Serve's controller can't be asked for its replicas", exc_info=True)
