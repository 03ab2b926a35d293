"""Draws plots in a worker process of Ray's: the ingress imports no matplotlib, and never stalls."""

import asyncio
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import ray

from deployments.errors import ReplicaUnavailableError
from deployments.replica_report import ReplicaReport

logger = logging.getLogger("ray.serve")

MODULE: Final = "deployments.memory_plot"

TIMEOUT_S: Final = 60.0
"""How long a plot may take. The first one starts a process, and matplotlib looks for fonts."""


async def draw_history(replicas: Sequence[tuple[str, ReplicaReport]]) -> bytes:
    """Draw the history of replicas, each with its model's id, as a PNG file.

    Raises:
        ReplicaUnavailableError: No worker has drawn it.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            drawn: bytes = await _draw.remote(list(replicas))
    except Exception as error:
        logger.warning("the plot of the memory can't be drawn", exc_info=True)
        raise ReplicaUnavailableError("The plot could not be drawn.") from error
    return drawn


@ray.remote(num_cpus=0)
def _draw(replicas: list[tuple[str, ReplicaReport]]) -> Any:
    return import_module(MODULE).draw_history(replicas)
