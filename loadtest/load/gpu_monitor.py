"""Samples this machine's GPUs with nvidia-smi; useful if the server runs on the same machine."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from loadtest.client.clock import Clock

_FIELDS: Final = ("index", "utilization.gpu", "memory.used", "power.draw")
_COMMAND: Final = (
    "nvidia-smi",
    f"--query-gpu={','.join(_FIELDS)}",
    "--format=csv,noheader,nounits",
    "--loop-ms=1000",
)


def has_nvidia_smi() -> bool:
    """Return whether nvidia-smi is installed."""
    return shutil.which(_COMMAND[0]) is not None


@asynccontextmanager
async def watched_gpus(clock: Clock) -> AsyncIterator[list[dict[str, Any]]]:
    """Sample each GPU once a second until the block ends.

    Yields:
        The samples so far: `t_s`, `gpu`, `utilization_percent`, `memory_mib` and `power_w`; a value
        is None if the GPU does not report it.

    Raises:
        OSError: nvidia-smi can't be started.
    """
    samples: list[dict[str, Any]] = []
    process = await asyncio.create_subprocess_exec(*_COMMAND, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    reading = asyncio.ensure_future(_read(process.stdout, clock, samples))
    try:
        yield samples
    finally:
        reading.cancel()
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _read(lines: asyncio.StreamReader, clock: Clock, samples: list[dict[str, Any]]) -> None:
    async for line in lines:
        if (sample := parse_sample(line.decode("utf-8", "replace"), clock())) is not None:
            samples.append(sample)


def parse_sample(line: str, now_s: float) -> dict[str, Any] | None:
    """Parse a line of nvidia-smi; return None for a line that is not a sample."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(_FIELDS) or not fields[0].isdigit():
        return None
    utilization, memory, power = (_number(field) for field in fields[1:])
    return {
        "t_s": round(now_s, 3),
        "gpu": int(fields[0]),
        "utilization_percent": utilization,
        "memory_mib": memory,
        "power_w": power,
    }


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None
