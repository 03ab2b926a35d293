import threading
import time
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.compute.token_budget import TokenBudget
from deployments.contract.claims import NO_CLAIM, Claim
from deployments.pooling.lanes import (
    GPU_LANES,
    MAX_LANES,
    MIN_LANE_TOKENS,
    NUM_BATCHES_IN_SWEEP,
    Answer,
    EncodedText,
    Lanes,
    LaneWork,
    Sweep,
    choose_num_lanes,
    num_parts,
    texts_of,
)
from deployments.pooling.micro_batches import in_order
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue, Row, TurnOverError
from tests.pooling.tiny_classifiers import MODELS, qwen2

DEADLINE_S = 20
LONG = MIN_LANE_TOKENS
CPU = torch.device("cpu")
A, B = Claim(tenant="a"), Claim(tenant="b")


pytestmark = pytest.mark.usefixtures("two_threads")


class Setup:
    """A queue of jobs, and the lanes that take them."""

    def __init__(
        self,
        num_lanes: int = 2,
        max_tokens: int = 10**6,
        *,
        is_padded: bool = False,
        share_threads: bool = True,
    ) -> None:
        self.queue = RequestQueue(QueueLimits(1000, None))
        self.lanes = Lanes(
            self.queue,
            TokenBudget(max_tokens),
            num_lanes,
            is_padded=is_padded,
            share_threads=share_threads,
        )

    def put(self, *sizes: int, claim: Claim = NO_CLAIM) -> Job:
        job = Job(claim)
        self.queue._enter(job)
        self.queue.put(job, tuple((0,) * size for size in sizes))
        return job

    def take(self) -> LaneWork:
        work = self.lanes.take()
        assert work is not None
        return work


def sizes(work: LaneWork) -> list[int]:
    return [text.num_tokens for text in work.texts]


def test_a_single_text_gets_all_threads() -> None:
    setup = Setup()
    setup.put(LONG)
    work = setup.take()
    assert (sizes(work), work.num_threads) == ([LONG], 2)


def test_lanes_of_a_gpu_take_whole_micro_batches_while_another_runs() -> None:
    torch.set_num_threads(1)
    setup = Setup(max_tokens=3 * LONG, share_threads=False)
    for _ in range(4):
        setup.put(LONG)
    taken = [setup.take(), setup.take()]
    assert [sizes(work) for work in taken] == [[LONG] * 3, [LONG]]
    assert not any(work.is_alone for work in taken)


def test_waiting_texts_and_threads_are_divided_equally() -> None:
    setup = Setup()
    for _ in range(6):
        setup.put(LONG)
    taken = [setup.take(), setup.take()]
    assert [sizes(work) for work in taken] == [[LONG] * 3] * 2
    assert [work.num_threads for work in taken] == [1, 1]


def test_a_free_lane_takes_waiting_texts_while_another_computes() -> None:
    setup = Setup()
    setup.put(LONG, LONG)
    first, second = setup.take(), setup.take()
    setup.lanes.give_back(first)
    setup.put(7)
    third = setup.take()
    assert (sizes(third), third.num_threads) == ([7], 1)
    setup.lanes.give_back(second)
    setup.lanes.give_back(third)
    setup.put(8)
    assert setup.take().num_threads == 2


def test_while_a_single_text_has_all_threads_other_lanes_wait_for_them() -> None:
    setup = Setup()
    setup.put(LONG)
    lone = setup.take()
    setup.put(9)
    taken = list[LaneWork]()
    lane = threading.Thread(target=lambda: taken.append(setup.take()))
    lane.start()
    # Wait until the lane holds the turn; then only free threads let it continue.
    deadline_s = time.monotonic() + DEADLINE_S
    while setup.lanes._turn.acquire(blocking=False):
        setup.lanes._turn.release()
        assert time.monotonic() < deadline_s
    assert not taken
    setup.lanes.give_back(lone)
    lane.join(DEADLINE_S)
    assert [sizes(work) for work in taken] == [[9]]
    assert taken[0].num_threads == 2


def test_closing_ends_a_lane_that_waits_for_threads() -> None:
    setup = Setup()
    setup.put(LONG)
    lone = setup.take()
    taken = list[LaneWork | None]()
    lane = threading.Thread(target=lambda: taken.append(setup.lanes.take()))
    lane.start()
    setup.queue.close()
    setup.lanes.give_back(lone)
    lane.join(DEADLINE_S)
    assert taken == [None]


def test_parts_are_at_most_a_micro_batch_and_the_rest_of_a_sweep_comes_first() -> None:
    setup = Setup(max_tokens=2 * LONG)
    for _ in range(5):
        setup.put(LONG)
    for expected in ([LONG] * 2, [LONG] * 2, [LONG]):
        work = setup.take()
        setup.put(1)
        assert sizes(work) == expected
        setup.lanes.give_back(work)
    assert sizes(setup.take()) == [1, 1, 1]


def test_one_lane_takes_full_micro_batches_on_all_threads() -> None:
    setup = Setup(num_lanes=1, max_tokens=3 * LONG)
    for _ in range(4):
        setup.put(LONG)
    for expected in ([LONG] * 3, [LONG]):
        work = setup.take()
        assert (sizes(work), work.num_threads) == (expected, 2)
        setup.lanes.give_back(work)


def all_sizes(setup: Setup) -> list[list[int]]:
    """Run what waits, one micro-batch after the other; return the sizes of their texts."""
    found = list[list[int]]()
    while setup.lanes._sweeps or setup.lanes._waiting or setup.queue.num_waiting:
        work = setup.take()
        setup.lanes.give_back(work)
        found.append(sizes(work))
    return found


def test_texts_that_come_after_a_long_one_in_pieces_wait_for_a_piece_on_each_lane() -> None:
    setup = Setup(max_tokens=2 * LONG)
    setup.put(*[LONG] * 6)
    first = setup.take()
    setup.put(7)
    setup.put(8)
    setup.lanes.give_back(first)
    assert sizes(first) == [LONG]
    assert all_sizes(setup) == [[LONG], [LONG, 7, 8], [LONG], [LONG], [LONG]]


def test_a_long_text_that_comes_among_short_ones_adds_a_piece_to_each_of_their_sweeps() -> None:
    setup = Setup(num_lanes=1)
    for _ in range(10):
        setup.put(20)
    setup.put(*[60] * 4)
    setup.lanes.give_back(found := setup.take())
    assert sizes(found) == [20] * 10 + [60]
    for _ in range(10):
        setup.put(20)
    # The long text's next piece is older than the short ones.
    assert all_sizes(setup) == [[60, *[20] * 10], [60, 60]]


def test_a_sweep_that_completes_no_request_fills_micro_batches() -> None:
    setup = Setup(num_lanes=1, max_tokens=6 * LONG)
    for _ in range(2):
        setup.put(*[LONG] * 10)
    setup.lanes.give_back(found := setup.take())
    setup.put(7)
    assert sizes(found) == [LONG] * 6
    assert all_sizes(setup)[0] == [LONG, LONG, 7]


def test_small_texts_of_a_request_take_their_turn_together() -> None:
    setup = Setup(num_lanes=1, max_tokens=2 * LONG)
    setup.put(*[LONG // 3] * 7)
    setup.put(*[LONG] * 2)
    assert all_sizes(setup) == [
        [LONG // 3] * 3 + [LONG],
        [LONG // 3] * 3 + [LONG],
        [LONG // 3],
    ]


@pytest.mark.parametrize("is_padded", [False, True])
def test_where_full_micro_batches_count_a_sweep_has_several_of_a_single_request(
    *, is_padded: bool
) -> None:
    setup = Setup(num_lanes=1, max_tokens=4 * LONG, is_padded=is_padded, share_threads=is_padded)
    setup.put(*[LONG] * 40)
    first = setup.take()
    setup.put(7)
    setup.lanes.give_back(first)
    found = [sizes(first), *all_sizes(setup)]
    assert found[:NUM_BATCHES_IN_SWEEP] == [[LONG] * 4] * NUM_BATCHES_IN_SWEEP
    assert 7 in found[NUM_BATCHES_IN_SWEEP]
    assert sorted(size for each in found for size in each) == [7, *[LONG] * 40]


def test_pieces_that_nobody_waits_for_any_more_take_no_turn() -> None:
    setup = Setup(num_lanes=1, max_tokens=2 * LONG)
    gone = setup.put(*[LONG] * 100)
    setup.lanes.give_back(setup.take())
    gone.has_left = True
    setup.put(7)
    assert all_sizes(setup) == [[7]]


def tenants(work: LaneWork) -> str:
    return "".join(text.answer.claim.tenant for text in work.texts)


def test_another_tenant_s_texts_wait_for_two_micro_batches_and_not_for_the_sweep() -> None:
    setup = Setup(num_lanes=1, max_tokens=2 * LONG)
    for _ in range(8):
        setup.put(LONG, claim=A)
    found = [setup.take()]
    for _ in range(3):
        setup.put(LONG, claim=B)
    for _ in range(5):
        setup.lanes.give_back(found[-1])
        found.append(setup.take())
    assert [tenants(work) for work in found] == ["aa", "aa", "bb", "ba", "aa", "a"]


def test_texts_are_computed_by_their_tenants_weights() -> None:
    setup = Setup(num_lanes=1, max_tokens=LONG)
    heavy = Claim(tenant="h", weight=3)
    for _ in range(8):
        setup.put(LONG, claim=A)
        setup.put(LONG, claim=heavy)
    found = []
    for _ in range(12):
        found.append(setup.take())
        setup.lanes.give_back(found[-1])
    order = "".join(map(tenants, found))
    assert (order[:8].count("h"), order.count("h")) == (6, 8)


def test_a_better_priority_s_texts_come_before_a_sweep_that_has_begun() -> None:
    setup = Setup(num_lanes=1, max_tokens=LONG)
    for _ in range(3):
        setup.put(LONG, claim=A)
    setup.lanes.give_back(setup.take())
    setup.put(LONG, claim=Claim(1, "late"))
    setup.put(LONG, LONG, claim=Claim(-1, "soon"))
    found = []
    for _ in range(5):
        found.append(setup.take())
        setup.lanes.give_back(found[-1])
    assert list(map(tenants, found)) == ["soon", "soon", "a", "a", "late"]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("claims", [[NO_CLAIM], [A, B]])
def test_a_micro_batch_looks_at_its_own_texts_and_at_none_that_wait_behind_it(
    claims: list[Claim], *, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(num_lanes=2, max_tokens=8 * LONG, is_padded=is_padded)
    for claim in claims:
        setup.put(*[LONG] * 100, claim=claim)
    num_in_sweep = 0 if is_padded else 8  # a take that begins one looks at these, too
    setup.lanes.give_back(setup.take())  # looks at all, once
    looked_at = set[int]()

    def look(text: EncodedText, name: str) -> object:
        looked_at.add(id(text))
        return object.__getattribute__(text, name)

    monkeypatch.setattr(EncodedText, "__getattribute__", look)
    for number in range(8):
        if number == 4:
            setup.put(LONG, claim=Claim(tenant="late"))
        work = setup.take()
        setup.lanes.give_back(work)
        num_looked_at = len(looked_at)
        assert set(map(id, work.texts)) <= looked_at
        assert num_looked_at <= len(work.texts) + len(claims) + 1 + num_in_sweep
        looked_at.clear()


@given(
    texts=st.lists(st.integers(1, 3), min_size=1, max_size=12),
    num_taken=st.integers(0, 11),
    is_padded=st.booleans(),
)
def test_a_sweep_s_figures_are_those_of_its_rest(
    texts: list[int], num_taken: int, *, is_padded: bool
) -> None:
    found = [
        EncodedText(i, (0,) * size, Answer(Job(came_s=float(size * 7 % 5))))
        for i, size in enumerate(texts)
    ]
    sweep = Sweep(in_order(found, is_padded=is_padded))
    for _ in range(min(num_taken, len(texts) - 1)):
        sweep.texts.popleft()
    rest = [text.num_tokens for text in sweep.texts]
    assert (sweep.num_tokens, sweep.longest) == (sum(rest), max(rest))
    assert sweep.came_s == min(text.answer.came_s for text in sweep.texts)


def test_abandoned_texts_are_handed_to_no_lane() -> None:
    setup = Setup()
    setup.put(LONG).has_left = True
    assert setup.take().texts == []


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
def test_no_part_is_smaller_than_the_longest_text_or_the_minimum(
    texts: list[int], expected: int
) -> None:
    assert num_parts(sum(texts), max(texts, default=0), num_lanes=4) == expected


@given(
    texts=st.lists(st.integers(1, 2000), min_size=1, max_size=60),
    num_lanes=st.integers(1, MAX_LANES),
    max_tokens=st.integers(1, 4000),
)
def test_each_text_is_in_one_part_and_no_thread_is_given_twice(
    texts: list[int], num_lanes: int, max_tokens: int
) -> None:
    torch.set_num_threads(num_lanes)
    setup = Setup(num_lanes, max_tokens)
    setup.put(*texts)
    running, found = list[LaneWork](), list[int]()
    while len(found) < len(texts):
        if sum(work.num_threads for work in running) == num_lanes:
            setup.lanes.give_back(running.pop(0))
        work = setup.take()
        running.append(work)
        assert work.num_threads >= 1
        assert sum(each.num_threads for each in running) <= num_lanes
        assert len(work.texts) == 1 or sum(sizes(work)) <= max_tokens
        found += [text.index for text in work.texts]
    assert found == list(range(len(texts)))


def test_a_cpu_has_a_lane_for_each_thread_and_a_gpu_two() -> None:
    model = MODELS["roberta"]()
    assert choose_num_lanes(model, CPU, 2) == 2
    assert choose_num_lanes(model, CPU, 1000) == MAX_LANES
    assert choose_num_lanes(model, torch.device("cuda", 0), 16) == GPU_LANES


@pytest.mark.parametrize(("kind", "expected"), [("default", 2), ("dynamic", 1)])
def test_a_model_whose_positions_depend_on_its_batch_has_one_lane(kind: str, expected: int) -> None:
    model = qwen2(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    assert choose_num_lanes(model, CPU, 2) == expected


def test_a_job_has_begun_once_a_lane_has_one_of_its_texts_and_its_rest_can_be_given_back() -> None:
    setup = Setup(max_tokens=LONG)
    first, second = setup.put(LONG, LONG), setup.put(LONG)
    work = setup.take()
    assert (first.has_begun, second.has_begun) == (True, False)
    setup.queue.give_back(begun=True)
    for text in work.texts:
        text.answer.note(text.index, b"late")
    setup.lanes.give_back(work)
    setup.queue.poke()
    assert setup.take().texts == [], "nobody waits for the others"
    for job in (first, second):
        assert isinstance(job.answer.exception(0), TurnOverError)


def test_a_job_that_is_given_back_while_its_last_row_comes_in_stays_so() -> None:
    class Late(Future[list[Row]]):
        def done(self) -> bool:
            if not super().done():
                self.set_exception(TurnOverError())
                return False
            return True

    job = Job(answer=Late())
    job.sequences = ((1,),)
    (text,) = texts_of(job)
    text.answer.note(0, b"row")
    assert isinstance(job.answer.exception(0), TurnOverError)
