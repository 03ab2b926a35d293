"""How long short texts wait for a long one that is classified in pieces.

Users send short texts in a closed loop, each its own request, to this project's worker without a
server. By turns with that, one more user sends a text of 5,000 characters in pieces: once, or again
and again.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.classification.offline import OurWorker, our_worker
from benchmarks.classification.table import Cell, Figures
from benchmarks.classification.texts import SHORT, documentation, make_texts, split
from deployments.pooling.request_queue import TokenIds

NUM_SHORT = 200
LONG_CHARS = 5000
GOAL = 1.5
"""The most that the short texts' p95 may grow."""

COLUMNS = (
    "users",
    "long texts",
    "p50, ms",
    "p95, ms",
    "p95, alone, ms",
    "p95 / alone",
    "goal",
    "long, p50, ms",
    "tokens/s / alone",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """What was seen in the runs of one kind.

    Attributes:
        short_s: How long each short text took.
        long_s: How long each long text took.
        rates: Tokens per second, of each run.
    """

    short_s: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the short texts' times, in ms."""
        return 1000 * float(np.percentile(self.short_s, percent))


def measure(folder: str, users: Sequence[int], rounds: int) -> Figures:
    """Run the rounds for each number of users, by turns with and without long texts."""
    rows = list[Sequence[Cell]]()
    with our_worker(folder) as ours:
        short = ours.encoded(make_texts(SHORT, NUM_SHORT))
        pieces = ours.encoded(split(documentation()[:LONG_CHARS]))
        asyncio.run(_run(Arm(), ours, short, pieces, max(users), None))  # a warm-up
        for num_users in users:
            alone, once, always = Arm(), Arm(), Arm()
            for _ in range(rounds):
                for arm, num_long in ((alone, 0), (once, 1), (always, None)):
                    asyncio.run(_run(arm, ours, short, pieces, num_users, num_long))
            rows += [
                _row(num_users, name, arm, alone)
                for name, arm in (("one", once), ("one after the other", always))
            ]
    return Figures(
        "long_and_short",
        f"(e) {NUM_SHORT} short texts ({SHORT} characters) beside texts of {LONG_CHARS} in pieces",
        COLUMNS,
        rows,
        (f"all of {rounds} rounds by turns, without a server; long texts come after a quarter",),
    )


async def _run(
    arm: Arm,
    ours: OurWorker,
    short: Sequence[TokenIds],
    pieces: tuple[TokenIds, ...],
    num_users: int,
    num_long: int | None,
) -> None:
    """Classify all short texts, and `num_long` long ones meanwhile; None: until those end."""
    numbers = itertools.count()
    quarter, num_tokens = asyncio.Event(), 0
    started = time.perf_counter()

    async def classify(sequences: tuple[TokenIds, ...]) -> float:
        nonlocal num_tokens
        sent = time.perf_counter()
        with ours.queue.entered() as job:
            ours.queue.put(job, sequences)
            await asyncio.wrap_future(job.answer)
        num_tokens += sum(map(len, sequences))
        return time.perf_counter() - sent

    async def user() -> None:
        while (number := next(numbers)) < len(short):
            if number == len(short) // 4:
                quarter.set()
            arm.short_s.append(await classify((short[number],)))

    async def user_of_long() -> None:
        await quarter.wait()
        for _ in itertools.count() if num_long is None else range(num_long):
            arm.long_s.append(await classify(pieces))

    users = asyncio.gather(*(user() for _ in range(num_users)))
    long = asyncio.create_task(user_of_long())
    await users
    arm.rates.append(num_tokens / (time.perf_counter() - started))
    if num_long is None:
        long.cancel()
    await asyncio.wait([long])


def _row(num_users: int, name: str, arm: Arm, alone: Arm) -> Sequence[Cell]:
    p95, p95_alone = arm.percentile_ms(95), alone.percentile_ms(95)
    return (
        num_users,
        name,
        arm.percentile_ms(50),
        p95,
        p95_alone,
        p95 / p95_alone,
        GOAL,
        1000 * statistics.median(arm.long_s) if arm.long_s else "-",
        statistics.median(arm.rates) / statistics.median(alone.rates),
    )
