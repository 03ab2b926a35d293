"""ModelReplica: starts and stops a replica, whatever its model does.

A replica is one process with one model on one device, or on a share of one.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from uuid import uuid4

import ray
from transformers.utils import logging as transformers_logging

from deployments.assigned_device import open_assigned_device
from deployments.channel.server import ChannelServer
from deployments.channel.tls import TlsFiles
from deployments.device.device import MemoryDevice
from deployments.model_spec import ModelSpec

logger = logging.getLogger("ray.serve.raystream.replica")
"""Below Serve's logger, whose own INFO lines do not reach the terminal of `make serve`."""


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

    A subclass starts its model in `_start` and stops it in `_stop`.
    """

    _fingerprint: str | None = None

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_assigned_device,
    ) -> None:
        """Load the model onto its share of the device and warm it up.

        Args:
            spec: The model.
            open_device: Returns the device for the model.

        Raises:
            UnsupportedModelError: The model can't be served; one line says why.
            DeviceMemoryError: The share of the device is too small.
        """
        started = time.monotonic()
        _hide_bars_of_weights()
        self._spec = spec
        self._replica_id = uuid4().hex
        self._channels = ChannelServer(node_address(), TlsFiles.of(os.environ))
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._device = open_device(spec)
        placed = self._start()
        logger.info(
            "%s is ready after %.1f s on %s: share %g of the device, %d compute thread(s), %s",
            spec.id,
            time.monotonic() - started,
            self._device.name,
            spec.device_share,
            placed.num_threads,
            placed.summary,
        )

    def record_replica_metadata(self) -> dict[str, str | None]:
        """Return what Serve tells the callers of this replica; asked once, after the start."""
        return {"replica_id": self._replica_id, "fingerprint": self._fingerprint}

    def _start(self) -> PlacedModel:
        """Load the model, start the threads that run it, and return it."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the threads that `_start` has started; `_start` may have failed at any point."""
        raise NotImplementedError

    def __del__(self) -> None:
        """End the threads when Serve drops the replica."""
        # A subclass may have failed before it called `__init__`.
        if hasattr(self, "_encoding"):
            self._stop()
            self._channels.close()
            self._encoding.shutdown(wait=False)


def node_address() -> str:
    """Return the address of this node in Ray's cluster; the loopback's if Ray does not run."""
    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call] # Ray leaves it untyped


def _hide_bars_of_weights() -> None:
    """Hide the bars that transformers draws while it loads weights: a log holds tatters of them.

    Bars of downloads stay: nothing else tells how far those are.
    """

    def bar(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = {"disable": True} if kwargs.get("desc") == "Loading weights" else {}
        return make(*args, **(kwargs | hidden))

    transformers_logging.set_tqdm_hook(bar)
