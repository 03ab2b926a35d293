"""Open-loop arrivals on a device of known speed.

Both designs run in one process without HTTP: `@serve.batch` around the device, and this project's
classifier with its tokenizer, queue and worker. Each request is one text, and its latency is
measured from its scheduled time.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baselines.batch_on_arrival import BatchOnArrival
from benchmarks.baselines.replica_context import pass_for_a_replica
from benchmarks.classification.designs import RAYSTREAM, SERVE_BATCH, Classify, ours
from benchmarks.classification.fake_device import FakeDevice, FakeDeviceClassifier
from benchmarks.classification.load import Latencies, open_loop, poisson_arrivals
from benchmarks.classification.table import Cell, Figures

GOALS_MS = {120: 45.0, 240: 50.0, 480: 75.0}
"""The goal for this project's p50, by requests per second."""

COLUMNS = (
    "RPS",
    "design",
    "p50, ms",
    "p95, ms",
    "mean batch",
    "p50 / serve.batch",
    "p50 goal",
)

TEXT = "Return the current time in seconds since the Epoch."


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one design at one rate."""

    latencies: Latencies
    mean_batch: float


async def measure(folder: str, duration_s: float, seed: int = 0) -> Figures:
    """Send the same arrivals to both designs at each rate.

    Args:
        folder: The model whose tokenizer this project's classifier uses.
        duration_s: The length of each load. If a design is overloaded, its latencies grow with it.
        seed: The seed of the arrivals.
    """
    pass_for_a_replica()
    naive_device, our_device = FakeDevice(), FakeDevice()
    design = BatchOnArrival(naive_device, SERVE_BATCH.max_batch_size, SERVE_BATCH.timeout_s)
    classifier = ours(FakeDeviceClassifier(folder, our_device))
    rows = list[Sequence[Cell]]()
    for rate, goal_ms in GOALS_MS.items():
        arrivals = poisson_arrivals(rate, duration_s, seed=seed)
        naive = await _outcome(design.classify, naive_device, arrivals)
        outcome = await _outcome(classifier, our_device, arrivals)
        rows += [
            (*_row(rate, SERVE_BATCH.name, naive, naive), "-"),
            (*_row(rate, RAYSTREAM.name, outcome, naive), goal_ms),
        ]
    return Figures(
        "open_loop",
        f"(c) open loop, {duration_s:g} s each, a device of 20 ms + 1 ms a text",
        COLUMNS,
        rows,
        ("in one process, without HTTP; serve.batch MAX_BATCH_SIZE BATCH_WAIT_TIMEOUT_S",),
    )


async def _outcome(classify: Classify, device: FakeDevice, arrivals: Sequence[float]) -> Outcome:
    for _ in range(3):
        await classify([TEXT])
    calls, pieces = device.counts.calls, device.counts.pieces
    gc.collect()
    latencies = await open_loop(lambda number: classify([TEXT]), arrivals)
    mean_batch = (device.counts.pieces - pieces) / (device.counts.calls - calls)
    return Outcome(latencies, mean_batch)


def _row(rate: int, name: str, outcome: Outcome, base: Outcome) -> Sequence[Cell]:
    p50 = outcome.latencies.percentile_ms(50)
    return (
        rate,
        name,
        p50,
        outcome.latencies.percentile_ms(95),
        outcome.mean_batch,
        p50 / base.latencies.percentile_ms(50),
    )
