import asyncio
from collections.abc import Sequence

import pytest
from ray.serve import context

from benchmarks.baselines.batch_on_arrival import BatchOnArrival
from benchmarks.baselines.piece_per_call import PiecePerCall
from benchmarks.baselines.queue_batcher import QueueBatcher
from benchmarks.baselines.replica_context import pass_for_a_replica

LONG_S = 3600
"""No batch waits so long: one that is full must not wait at all."""


KEPT = list[BatchOnArrival[int]]()
"""Ray's queue makes an event loop of its own when it is let go, and leaves it open."""


class FakePipeline:
    """Gives each text's length and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[int]:
        self.batches.append(list(texts))
        if "poison" in texts:
            raise ValueError("the model failed")
        return [len(text) for text in texts]


async def test_a_call_for_each_piece_never_sees_two_together() -> None:
    pipeline = FakePipeline()
    assert await PiecePerCall(pipeline).classify(["a", "bb", "ccc"]) == [1, 2, 3]
    assert pipeline.batches == [["a"], ["bb"], ["ccc"]]


async def test_the_queue_batcher_takes_what_came_within_the_timeout() -> None:
    pipeline = FakePipeline()
    batcher = QueueBatcher(pipeline, max_batch_size=8, timeout_s=0.01)
    async with batcher.running():
        answers = await asyncio.gather(batcher.classify(["a", "bb"]), batcher.classify(["ccc"]))
    assert list(answers) == [[1, 2], [3]]
    assert pipeline.batches == [["a", "bb", "ccc"]]


async def test_the_queue_batcher_does_not_wait_once_a_batch_is_full() -> None:
    pipeline = FakePipeline()
    batcher = QueueBatcher(pipeline, max_batch_size=2, timeout_s=LONG_S)
    async with batcher.running(), asyncio.timeout(60):
        assert await batcher.classify(["a", "bb", "ccc", "dddd"]) == [1, 2, 3, 4]
    assert pipeline.batches == [["a", "bb"], ["ccc", "dddd"]]


async def test_a_failing_piece_fails_all_calls_of_its_batch_and_no_others() -> None:
    batcher = QueueBatcher(FakePipeline(), max_batch_size=2, timeout_s=LONG_S)
    async with batcher.running(), asyncio.timeout(60):
        first, second, third = await asyncio.gather(
            batcher.classify(["a"]),
            batcher.classify(["poison"]),
            batcher.classify(["bb", "ccc"]),
            return_exceptions=True,
        )
    assert isinstance(first, ValueError)
    assert isinstance(second, ValueError)
    assert third == [2, 3]


@pytest.mark.usefixtures("replica_context")
async def test_serve_batch_gives_each_call_its_own_results() -> None:
    pipeline = FakePipeline()
    design = BatchOnArrival(pipeline, max_batch_size=3, timeout_s=LONG_S)
    KEPT.append(design)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(design.classify(["a", "bb"]), design.classify(["ccc"]))
    assert list(answers) == [[1, 2], [3]]
    assert pipeline.batches == [["a", "bb", "ccc"]]


@pytest.mark.usefixtures("replica_context")
async def test_two_designs_with_serve_batch_share_no_queue() -> None:
    pipelines = FakePipeline(), FakePipeline()
    designs = [BatchOnArrival(pipeline, 1, LONG_S) for pipeline in pipelines]
    KEPT.extend(designs)
    async with asyncio.timeout(60):
        await asyncio.gather(designs[0].classify(["a"]), designs[1].classify(["bb"]))
    assert [pipeline.batches for pipeline in pipelines] == [[["a"]], [["bb"]]]


@pytest.fixture
def replica_context(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", None)
    pass_for_a_replica()
