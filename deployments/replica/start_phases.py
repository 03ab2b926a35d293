"""How long each phase of a replica's start takes: its process, imports, weights and warm-up."""

import time
from collections.abc import Callable
from typing import Final, Self

import psutil

import deployments

EndPhase = Callable[[str], object]
"""Notes that a phase, of this name, has ended."""

MAX_PROCESS_S: Final = 30.0
"""Ray may keep idle processes for the next actor; the age of one says nothing about a start."""


class StartPhases:
    """The phases of a start, one after the other."""

    def __init__(self, began_s: float, now_s: Callable[[], float] = time.time) -> None:
        """Begin with the first phase.

        Args:
            began_s: When it began, in Unix seconds.
            now_s: Returns the time, in Unix seconds.
        """
        self._began_s = self._last_s = began_s
        self._now_s = now_s
        self._phases: list[str] = []

    @classmethod
    def of_process(cls) -> Self:
        """Return the phases of this process, whose imports have just ended."""
        created_s, imports_s = psutil.Process().create_time(), deployments.IMPORT_BEGAN_S
        if imports_s - created_s > MAX_PROCESS_S:
            phases = cls(imports_s)
        else:
            phases = cls(created_s)
            phases.end("process", imports_s)
        phases.end("imports")
        return phases

    def end(self, name: str, at_s: float | None = None) -> None:
        """Note that a phase has ended, now or at another time, and the next one begins."""
        now_s = self._now_s() if at_s is None else at_s
        self._phases.append(f"{name} {now_s - self._last_s:.1f}")
        self._last_s = now_s

    def leave_out(self) -> None:
        """Note that the phase that ends now was none of the start: it waited for another model."""
        now_s = self._now_s()
        self._began_s += now_s - self._last_s
        self._last_s = now_s

    @property
    def total_s(self) -> float:
        """Seconds since the first phase began, without what was left out."""
        return self._last_s - self._began_s

    def __str__(self) -> str:
        """Return each phase with its seconds."""
        return ", ".join(self._phases)
