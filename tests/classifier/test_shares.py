import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.classifier.shares import (
    MAX_LANES,
    MIN_SHARE_TOKENS,
    Share,
    Shares,
    choose_num_lanes,
    num_shares,
)
from deployments.classifier.waiting_line import Job, LineLimits, WaitingLine
from deployments.engine.step_budget import StepBudget
from tests.classifier.tiny_classifiers import MODELS, qwen2

DEADLINE_S = 20
LONG = MIN_SHARE_TOKENS
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Desk:
    """Shares of a line, and the jobs that were put into it."""

    def __init__(self, num_lanes: int = 2, max_tokens: int = 10**6) -> None:
        self.line = WaitingLine(LineLimits(1000, None))
        self.shares = Shares(self.line, StepBudget(max_tokens), num_lanes, is_padded=False)

    def put(self, *sizes: int) -> Job:
        job = Job()
        self.line._enter(job)
        self.line.put(job, tuple((0,) * size for size in sizes))
        return job

    def take(self) -> Share:
        share = self.shares.take()
        assert share is not None
        return share


def sizes(share: Share) -> list[int]:
    return [piece.num_tokens for piece in share.pieces]


def test_a_lone_text_gets_all_threads() -> None:
    desk = Desk()
    desk.put(LONG)
    share = desk.take()
    assert (sizes(share), share.num_threads) == ([LONG], 2)


def test_what_waits_is_shared_equally_and_so_are_the_threads() -> None:
    desk = Desk()
    for _ in range(6):
        desk.put(LONG)
    shares = [desk.take(), desk.take()]
    assert [sizes(share) for share in shares] == [[LONG] * 3] * 2
    assert [share.num_threads for share in shares] == [1, 1]


def test_a_lane_that_is_free_takes_what_waits_while_another_computes() -> None:
    desk = Desk()
    desk.put(LONG, LONG)
    first, second = desk.take(), desk.take()
    desk.shares.give_back(first)
    desk.put(7)
    third = desk.take()
    assert (sizes(third), third.num_threads) == ([7], 1)
    desk.shares.give_back(second)
    desk.shares.give_back(third)
    desk.put(8)
    assert desk.take().num_threads == 2


def test_while_a_lone_text_has_all_threads_the_others_wait_for_them() -> None:
    desk = Desk()
    desk.put(LONG)
    lone = desk.take()
    desk.put(9)
    taken = list[Share]()
    lane = threading.Thread(target=lambda: taken.append(desk.take()))
    lane.start()
    # It has its turn, and so would hold up whoever asked next; only the threads let it go on.
    while desk.shares._turn.acquire(blocking=False):
        desk.shares._turn.release()
    assert not taken
    desk.shares.give_back(lone)
    lane.join(DEADLINE_S)
    assert [sizes(share) for share in taken] == [[9]]
    assert taken[0].num_threads == 2


def test_closing_ends_a_lane_that_waits_for_threads() -> None:
    desk = Desk()
    desk.put(LONG)
    lone = desk.take()
    taken = list[Share | None]()
    lane = threading.Thread(target=lambda: taken.append(desk.shares.take()))
    lane.start()
    desk.line.close()
    desk.shares.give_back(lone)
    lane.join(DEADLINE_S)
    assert taken == [None]


def test_shares_are_no_larger_than_a_micro_batch_and_what_is_left_of_a_sweep_comes_first() -> None:
    desk = Desk(max_tokens=2 * LONG)
    desk.put(*[LONG] * 5)
    for expected in ([LONG] * 2, [LONG] * 2, [LONG]):
        share = desk.take()
        desk.put(1)
        assert sizes(share) == expected
        desk.shares.give_back(share)
    assert sizes(desk.take()) == [1, 1, 1]


def test_one_lane_takes_full_micro_batches_on_all_threads() -> None:
    desk = Desk(num_lanes=1, max_tokens=3 * LONG)
    desk.put(*[LONG] * 4)
    for expected in ([LONG] * 3, [LONG]):
        share = desk.take()
        assert (sizes(share), share.num_threads) == (expected, 2)
        desk.shares.give_back(share)


def test_texts_that_nobody_waits_for_are_in_no_share() -> None:
    desk = Desk()
    desk.put(LONG).has_left = True
    assert desk.take().pieces == []


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], 1),
        ([LONG], 1),
        ([LONG, LONG], 2),
        ([2 * LONG, LONG], 2),
        ([3 * LONG, LONG], 1),
        ([1] * 10, 1),
        ([1] * (3 * LONG), 3),
        ([LONG] * 100, 4),
    ],
)
def test_no_share_is_smaller_than_the_longest_text_or_the_least_that_pays(
    texts: list[int], expected: int
) -> None:
    assert num_shares(texts, num_lanes=4) == expected


@given(
    texts=st.lists(st.integers(1, 2000), min_size=1, max_size=60),
    num_lanes=st.integers(1, MAX_LANES),
    max_tokens=st.integers(1, 4000),
)
def test_each_text_is_in_one_share_and_threads_are_never_given_twice(
    texts: list[int], num_lanes: int, max_tokens: int
) -> None:
    torch.set_num_threads(num_lanes)
    desk = Desk(num_lanes, max_tokens)
    desk.put(*texts)
    running, found = list[Share](), list[int]()
    while len(found) < len(texts):
        if sum(share.num_threads for share in running) == num_lanes:
            desk.shares.give_back(running.pop(0))
        share = desk.take()
        running.append(share)
        assert share.num_threads >= 1
        assert sum(each.num_threads for each in running) <= num_lanes
        assert len(share.pieces) == 1 or sum(sizes(share)) <= max_tokens
        found += [piece.index for piece in share.pieces]
    assert found == list(range(len(texts)))


def test_a_cpu_has_a_lane_for_each_thread_and_a_gpu_one() -> None:
    model = MODELS["roberta"]()
    assert choose_num_lanes(model, CPU, 2) == 2
    assert choose_num_lanes(model, CPU, 1000) == MAX_LANES
    assert choose_num_lanes(model, torch.device("cuda", 0), 2) == 1


@pytest.mark.parametrize(("kind", "expected"), [("default", 2), ("dynamic", 1)])
def test_a_model_whose_positions_depend_on_its_batch_has_one_lane(kind: str, expected: int) -> None:
    model = qwen2(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    assert choose_num_lanes(model, CPU, 2) == expected
