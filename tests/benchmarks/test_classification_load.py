import asyncio
import itertools

import numpy as np
import pytest

from benchmarks.classification.load import Latencies, closed_loop, open_loop, poisson_arrivals
from benchmarks.classification.texts import MAX_PIECE_CHARS, MIXED, SHORT, make_texts, split
from tests.stopped_clock import Clock


def test_arrivals_have_their_rate_and_are_the_same_in_every_run() -> None:
    arrivals = poisson_arrivals(200, 50)
    assert arrivals == poisson_arrivals(200, 50)
    assert arrivals != poisson_arrivals(200, 50, seed=1)
    assert len(arrivals) == pytest.approx(200 * 50, rel=0.05)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] <= 50


def test_arrivals_gaps_are_exponential() -> None:
    gaps = np.diff(poisson_arrivals(100, 100))
    assert np.mean(gaps) == pytest.approx(0.01, rel=0.05)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05)


def test_percentiles_are_numpy_s_linear_ones_of_the_raw_samples() -> None:
    latencies = Latencies(2.0, [0.010, 0.020, 0.030, 0.050])
    assert latencies.percentile_ms(50) == pytest.approx(25)
    assert latencies.percentile_ms(95) == pytest.approx(47)
    assert latencies.rate == 2.0


def test_a_window_without_answers_has_no_percentiles() -> None:
    assert np.isnan(Latencies(2.0, []).percentile_ms(50))
    assert Latencies(2.0, []).rate == 0


async def test_an_open_loop_measures_from_the_scheduled_time() -> None:
    async def blocking(number: int) -> None:
        """Block the event loop, so that the second request can't be sent in time."""
        deadline = loop.time() + 0.05
        while loop.time() < deadline:
            pass

    loop = asyncio.get_running_loop()
    latencies = await open_loop(blocking, [0.0, 0.001])
    assert latencies.samples_s[0] >= 0.05
    assert latencies.samples_s[1] >= 0.099 - 0.001


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    sent, all_sent = set[int](), asyncio.Event()

    async def send(number: int) -> None:
        sent.add(number)
        if len(sent) == 5:
            all_sent.set()
        await all_sent.wait()

    async with asyncio.timeout(60):
        latencies = await open_loop(send, [0.001 * i for i in range(5)])
    assert sent == set(range(5))
    assert len(latencies.samples_s) == 5


async def test_in_a_closed_loop_each_user_has_one_open_request(advance: Clock) -> None:
    open_now = most_open = 0
    numbers = list[int]()

    async def send(number: int) -> None:
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        numbers.append(number)
        await asyncio.sleep(0)
        advance(1)
        open_now -= 1

    latencies = await closed_loop(send, 3, warm_up_s=10, window_s=20)
    assert most_open == 3
    assert numbers == list(range(len(numbers)))
    # An answer comes each second: those from 10 to 30 count, and none is asked for from 30 on.
    assert (len(latencies.samples_s), len(numbers)) == (21, 3 + 29)


async def test_a_failed_request_ends_the_measurement() -> None:
    async def send(number: int) -> None:
        raise ConnectionError("the server has gone")

    with pytest.raises(ConnectionError):
        await open_loop(send, [0.0])


def test_texts_have_the_requested_lengths_and_are_the_same_in_every_run() -> None:
    for lengths in (SHORT, MIXED):
        sizes = [len(text) for text in make_texts(lengths, 500)]
        assert lengths.min_chars <= min(sizes) < lengths.min_chars + 50
        assert lengths.max_chars - 50 < max(sizes) <= lengths.max_chars
        assert sum(sizes) == pytest.approx(500 * (lengths.min_chars + lengths.max_chars) / 2)
        few = [len(text) for text in make_texts(lengths, 10)]
        assert sum(few) == pytest.approx(10 * (lengths.min_chars + lengths.max_chars) / 2, rel=0.01)
    assert make_texts(MIXED, 5) == make_texts(MIXED, 5)
    assert make_texts(MIXED, 5) != make_texts(MIXED, 5, seed=1)


def test_pieces_make_up_the_text() -> None:
    text = "".join(itertools.islice(itertools.cycle("abc"), 2 * MAX_PIECE_CHARS + 1))
    assert "".join(split(text)) == text
    assert [len(piece) for piece in split(text)] == [MAX_PIECE_CHARS, MAX_PIECE_CHARS, 1]
