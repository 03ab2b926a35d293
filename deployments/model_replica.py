"""ModelReplica: starts and stops a replica, whatever its model does.

A replica is one process with one model on one device, or on a share of one. A replica that finds
that it can't serve again ends its process.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any, Final, Protocol
from uuid import uuid4

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from transformers.utils import logging as transformers_logging

from deployments.assigned_device import open_assigned_device
from deployments.autoscaling import ReplicaLoad
from deployments.channel.server import ChannelServer
from deployments.channel.tls import TlsFiles
from deployments.compute.errors import UnsupportedModelError
from deployments.device.device import MemoryDevice
from deployments.errors import ReplicaUnavailableError
from deployments.model_spec import ModelSpec
from deployments.own_actor import end_own_actor
from deployments.start_phases import StartPhases

logger = logging.getLogger("ray.serve.raystream.replica")
"""Below Serve's logger, whose own INFO lines do not reach the terminal of `make serve`."""


RECENT_S: Final = 5.0
"""How long a model counts as used after a request."""


class PlacedModel(Protocol):
    """A model on its share of a device, ready to run."""

    @property
    def num_threads(self) -> int:
        """The number of compute threads."""
        ...

    @property
    def summary(self) -> str:
        """A short description of the model for the log."""
        ...


class ModelReplica:
    """One model on its share of a device, a thread that tokenizes, and channels to ingresses.

    A subclass starts its model in `_start`, stops it in `_stop`, and says how it is in
    `_check_health` and `_is_dead`.
    """

    _fingerprint: str | None = None

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_assigned_device,
        end_process: Callable[[], None] = end_own_actor,
    ) -> None:
        """Load the model onto its share of the device and warm it up.

        Args:
            spec: The model.
            open_device: Returns the device for the model.
            end_process: Ends this process, if that may be.

        Raises:
            UnsupportedModelError: The model can't be served; one line says why.
            DeviceMemoryError: The share of the device is too small.
            Exception: Any other error, without the errors that led to it: Serve shows it as it is,
                and the replica's log file has the rest.
        """
        self._phases = StartPhases.of_process()
        _hide_bars_of_weights()
        self._spec = spec
        self._end_process = end_process
        self._replica_id = _own_id()
        self._used_s = -inf
        self._channels = ChannelServer(node_address(), TlsFiles.of(os.environ))
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        try:
            self._device = open_device(spec)
            placed = self._start()
        except Exception as error:  # noqa: BLE001 - raised again
            self._log("can't start", error)
            raise error.with_traceback(None) from None
        self._phases.end("rest")
        logger.info(
            "%s is ready after %.1f s (%s) on %s: share %g of the device, %d compute thread(s), %s",
            spec.id,
            self._phases.total_s,
            self._phases,
            self._device.name,
            spec.device_share,
            placed.num_threads,
            placed.summary,
        )

    def record_replica_metadata(self) -> dict[str, str | None]:
        """Return what Serve tells the callers of this replica; asked once, after the start."""
        return {"fingerprint": self._fingerprint}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load, which Serve passes to the autoscaling policy."""
        return self._load.as_stats()

    def _note_use(self) -> None:
        """Note that somebody uses the model now."""
        self._used_s = time.monotonic()

    @property
    def _was_used(self) -> float:
        """1 if the model was used lately, else 0: Serve asks only from time to time."""
        return float(time.monotonic() - self._used_s < RECENT_S)

    @property
    def _load(self) -> ReplicaLoad:
        """The load of this moment."""
        raise NotImplementedError

    def _start(self) -> PlacedModel:
        """Load the model, start the threads that run it, and return it."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the threads that `_start` has started; `_start` may have failed at any point."""
        raise NotImplementedError

    async def check_health(self) -> None:
        """Raise unless the model has worked since the last call, or works now.

        A replica that won't work again says so in one line, and ends its process: Serve replaces it
        at once. Its requests have moved by then, or move now.

        Raises:
            ReplicaUnavailableError: The replica hung; its streams have moved.
            Exception: The model fails; Serve replaces the replica after three such checks.
        """
        if self._channels.was_given_up:
            raise ReplicaUnavailableError("The replica hung for seconds, and was taken for lost.")
        try:
            await self._check_health()
        except Exception as error:
            if self._is_dead:
                self._end(error)
            raise

    def _end(self, error: Exception) -> None:
        """Log why the replica ends, and end its process."""
        self._log("can't go on and is replaced", error)
        self._end_process()

    def _log(self, what: str, error: Exception) -> None:
        """Log an error in one line, and with its traceback in the file only."""
        logger.error("%s %s: %s", self._spec.id, what, _in_one_line(error))
        # Serve's handlers write a record with this mark to the file only.
        logger.error("the traceback", exc_info=error, extra={"log_to_stderr": False})

    async def _check_health(self) -> None:
        """Raise unless the model has worked since the last call, or works now."""
        raise NotImplementedError

    @property
    def _is_dead(self) -> bool:
        """Whether the threads that run the model have ended, or hang."""
        raise NotImplementedError

    def __del__(self) -> None:
        """End the threads when Serve drops the replica."""
        # A subclass may have failed before it called `__init__`.
        if hasattr(self, "_encoding"):
            self._stop()
            self._channels.close()
            self._encoding.shutdown(wait=False)


def _own_id() -> str:
    """Return Serve's id of this replica; a new one if Serve does not run it."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return uuid4().hex


def node_address() -> str:
    """Return the address of this node in Ray's cluster; the loopback's if Ray does not run."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call] # Ray leaves it untyped


def _in_one_line(error: BaseException) -> str:
    """Return an error and its cause; CUDA's errors have lines of advice after the first.

    An error about a model's files says all itself.
    """
    line = next(iter(str(error).splitlines()), type(error).__name__)
    if error.__cause__ is None or isinstance(error, UnsupportedModelError):
        return line
    return f"{line} ({type(error.__cause__).__name__}: {_in_one_line(error.__cause__)})"


def _hide_bars_of_weights() -> None:
    """Hide the bars that transformers draws while it loads weights: a log holds tatters of them.

    Bars of downloads stay: nothing else tells how far those are.
    """

    def bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = {"disable": True} if kwargs.get("desc") == "Loading weights" else {}
        return make(*args, **(kwargs | hidden))

    transformers_logging.set_tqdm_hook(bar)
