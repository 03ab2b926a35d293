"""Admission where the KV memory, not the number of sequences, says how many run."""

import asyncio
from contextlib import ExitStack

import pytest

from deployments.contract.errors import OverloadedError
from deployments.contract.generation import GenerationRequest, RequestGroup
from deployments.contract.sampling_params import SamplingParams
from deployments.generator.admission.admission import Admission, AdmissionLimits
from deployments.generator.admission.permit import Permit
from deployments.plan.kv_layout import KVLayout
from tests.stopped_clock import settle

LAYOUT = KVLayout(capacities=(100,), num_blocks=(10,), block_size=10)


class Held:
    """Permits that are held until the test ends, or until `end`."""

    def __init__(self, max_queued: int = 2, max_tokens: int | None = None) -> None:
        limits = AdmissionLimits(8, max_queued, max_tokens)
        self.now_s = 50.0
        self.counted = Admission(limits, LAYOUT, lambda: self.now_s)
        self.stacks: dict[Permit, ExitStack] = {}

    def take(
        self,
        num_tokens: int | None = None,
        group: RequestGroup | None = None,
        *,
        is_resumed: bool = False,
        is_planned: bool = False,
    ) -> Permit:
        """Take a permit, and weigh it if its number of tokens is given."""
        request = GenerationRequest(
            "r", "hi", SamplingParams(), is_resumed=is_resumed, is_planned=is_planned, group=group
        )
        with ExitStack() as stack:
            permit = stack.enter_context(self.counted.permit(request))
            if num_tokens is not None:
                self.counted.weigh(permit, num_tokens, num_tokens)
            self.stacks[permit] = stack.pop_all()
        return permit

    def end(self, permit: Permit) -> None:
        self.stacks.pop(permit).close()

    @property
    def numbers(self) -> tuple[int, int]:
        return self.counted.num_running, self.counted.num_waiting

    def running(self, *permits: Permit) -> list[bool]:
        return [permit.is_running for permit in permits]


def test_a_sequence_that_does_not_fit_waits_and_none_overtakes_it() -> None:
    held = Held()
    first, second = held.take(60), held.take(60)
    third = held.take(10)
    assert held.running(first, second, third) == [True, False, False]
    held.end(first)
    assert held.running(second, third) == [True, True]


def test_a_sequence_counts_with_what_the_engine_plans_for_it() -> None:
    held = Held()
    for _ in range(5):
        held.counted.weigh(held.take(), 100, 11)
    assert held.numbers == (5, 0)


def test_a_new_sequence_is_refused_if_it_would_have_to_wait_and_as_many_wait_as_may() -> None:
    held = Held(max_queued=2)
    for _ in range(3):
        held.take(60)
    assert held.numbers == (1, 2)
    assert held.counted.is_full
    with pytest.raises(OverloadedError, match="1 sequences run and 2 wait"):
        held.take()


def test_a_sequence_that_turns_out_to_wait_is_refused_if_as_many_wait_as_may() -> None:
    held = Held(max_queued=0)
    held.take(60)
    held.now_s += 7
    assert not held.counted.is_full, "a short one would be admitted"
    with pytest.raises(
        OverloadedError, match="too little memory for this one and 0 wait"
    ) as caught:
        held.take(60)
    assert caught.value.retry_after_s == 7, "the refused one does not count as throughput"
    held.take(40)
    assert held.numbers == (2, 0)


def test_a_sequence_that_turns_out_to_wait_counts_its_tokens_among_the_waiting() -> None:
    held = Held(max_queued=9, max_tokens=100)
    held.take(60)
    held.take(60)
    assert held.counted.num_waiting_tokens == 60
    with pytest.raises(OverloadedError, match="60 tokens wait"):
        held.take(41)
    held.take(40)
    assert held.counted.num_waiting_tokens == 100


def test_resumed_sequences_wait_before_new_ones_and_are_never_refused() -> None:
    held = Held(max_queued=1)
    first, new = held.take(60), held.take(60)
    resumed = [held.take(60, is_resumed=True) for _ in range(2)]
    assert held.numbers == (1, 3)
    held.end(first)
    assert held.running(new, *resumed) == [False, True, False]


def test_a_resumed_sequence_that_fits_does_not_wait_for_a_new_one_that_does_not() -> None:
    held = Held()
    held.take(60)
    new = held.take(60)
    resumed = held.take(40, is_resumed=True)
    assert held.running(new, resumed) == [False, True]


def test_a_sequence_that_still_runs_elsewhere_is_admitted_only_if_it_fits() -> None:
    held = Held()
    held.take(60)
    with pytest.raises(OverloadedError, match="still runs elsewhere"):
        held.take(60, is_resumed=True, is_planned=True)
    assert held.running(held.take(40, is_resumed=True, is_planned=True)) == [True]


def test_of_a_group_as_many_run_as_fit() -> None:
    held = Held(max_queued=2)
    group = [held.take(40, RequestGroup("g", 4, is_first=True))]
    group += [held.take(40, RequestGroup("g", 4, is_first=False)) for _ in range(3)]
    assert held.numbers == (2, 2)
    held.end(group[0])
    assert held.numbers == (2, 1)


def test_a_group_of_which_too_many_would_wait_is_refused_as_a_whole() -> None:
    held = Held(max_queued=1)
    with pytest.raises(OverloadedError):
        held.take(40, RequestGroup("g", 4, is_first=True))
    assert held.numbers == (0, 0)


def test_a_sibling_that_is_weighed_first_keeps_its_own_weight() -> None:
    held = Held()
    first = held.take(None, RequestGroup("g", 2, is_first=True))
    sibling = held.take(90, RequestGroup("g", 2, is_first=False))
    held.counted.weigh(first, 10, 10)
    assert held.running(first, sibling) == [True, True]
    assert held.numbers == (2, 0)
    assert held.running(held.take(10)) == [False]


async def test_a_suspect_waits_for_memory_too() -> None:
    held = Held()
    first, new = held.take(60), held.take(60)
    before = held.take(60, is_resumed=True)
    suspect = held.take(is_resumed=True)
    waits = asyncio.ensure_future(suspect.wait_for_turn())
    await settle()
    assert not waits.done()
    held.end(first)
    await waits
    assert held.running(before, suspect, new) == [True, True, False]
