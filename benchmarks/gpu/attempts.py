"""Runs the parts of a benchmark; if one fails, the others are still measured."""

import gc
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from deployments.compute.device_errors import is_fatal, is_out_of_memory, release_cache

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Attempts:
    """Runs parts one after another, within a time limit.

    Attributes:
        troubles: For each part without a result, its name and the reason, in order.
    """

    def __init__(
        self, device: torch.device, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock.

        Args:
            device: Where the parts run.
            limit_s: No part starts later than this many seconds from now.
            clock: Returns the time, in seconds.
        """
        self._device = device
        self._clock = clock
        self._end = clock() + limit_s
        self.troubles: list[str] = []

    def run(self, name: str, part: Callable[[], Result]) -> Result | None:
        """Run a part; return None if it failed or there was no time left.

        Raises:
            torch.AcceleratorError: The device failed, so all other parts would fail, too.
        """
        if self._clock() > self._end:
            self.troubles.append(f"{name}: no time was left")
            return None
        try:
            return part()
        except Exception as error:  # after any failure the other parts are worth measuring
            logger.warning("%s failed", name, exc_info=True)
            self.troubles.append(f"{name}: {_summary(error)}")
            if is_fatal(error):
                raise
        finally:
            # An engine is a reference cycle, and the next part needs its KV memory.
            gc.collect()
            release_cache(self._device)
        return None


def _summary(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}"
