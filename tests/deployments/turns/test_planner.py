"""Which models have turns, by simulation and step by step."""

import random
from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest

from benchmarks.turns.foresight import least_loads
from deployments.turns.planner import ModelState, Turns, fit_together
from tests.deployments.turns.simulation import Asked, Device

START_S = 8.0
"""From the decision to a running replica: one process ends, and another one loads."""

MIN_TURN_S = 30.0
IDLE = ModelState(is_running=False, is_wanted=False, has_work=False)
WAITS = ModelState(is_running=False, is_wanted=False, has_work=True)
WORKS = ModelState(is_running=True, is_wanted=True, has_work=True)
RESTS = ModelState(is_running=True, is_wanted=True, has_work=False)


def whole(models: str) -> dict[str, float]:
    """Return models of which each takes the whole device."""
    return dict.fromkeys(models, 1.0)


def device(
    requests: Iterable[Asked],
    parts: Mapping[str, float],
    breaks: str = "",
    max_start_s: float = 600,
) -> Device:
    turns = Turns(parts, MIN_TURN_S, max_start_s)
    return Device(turns, list(requests), START_S, frozenset(breaks))


def test_requests_for_a_b_a_a_c_at_once_need_each_model_once() -> None:
    found = device([Asked(each, 0.0, 5.0) for each in "ABAAC"], whole("ABC"))
    found.run(600)
    assert [model for _, model in found.begun] == ["A", "B", "C"]


@pytest.mark.parametrize("seed", range(12))
def test_three_models_load_at_most_twice_as_often_as_with_foresight(seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        Asked(chance.choice("ABAAC"), round(chance.uniform(0, 180), 1), chance.uniform(1, 20))
        for _ in range(chance.choice((5, 12, 30)))
    ]
    found = device(requests, whole("ABC"))
    found.run(3600)
    assert all(each.is_done for each in found.requests)
    assert max(each.turns_waited for each in found.requests) <= 3, "nobody waits for more turns"
    known = [(each.model, each.came_s) for each in requests]
    assert found.num_loads <= 2 * least_loads(known, found.longest_wait_s)


def test_models_that_always_have_work_get_turns_in_order_of_the_least_length() -> None:
    always = [Asked(each, 0.0, 1e9) for each in "ABC"]
    found = device(always, whole("ABC"))
    found.run(300)
    names = [model for _, model in found.begun]
    assert names == (["A", "B", "C"] * len(names))[: len(names)]
    lengths = {late - early for (early, _), (late, _) in pairwise(found.begun)}
    assert lengths == {START_S + MIN_TURN_S}


def test_a_model_keeps_its_turn_while_no_other_waits() -> None:
    found = device([Asked("A", 0.0, 500.0), Asked("B", 400.0, 1.0)], whole("AB"))
    found.run(1000)
    assert [model for _, model in found.begun] == ["A", "B", "A"]
    assert found.begun[1][0] == pytest.approx(400.0), "the turn of A had lasted long enough"


def test_an_idle_model_leaves_at_once_when_another_waits() -> None:
    turns = Turns(whole("AB"), MIN_TURN_S, 600)
    assert turns.update(0, {"A": WORKS, "B": IDLE}) == ("A",)
    assert turns.update(1, {"A": WORKS, "B": WAITS}) == ("A",)
    assert turns.update(2, {"A": RESTS, "B": WAITS}) == ("B",)


def test_the_one_that_has_waited_longest_is_next() -> None:
    turns = Turns(whole("ABC"), MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": IDLE, "C": IDLE})
    turns.update(1, {"A": WORKS, "B": IDLE, "C": WAITS})
    turns.update(2, {"A": WORKS, "B": WAITS, "C": WAITS})
    assert turns.update(MIN_TURN_S, {"A": WORKS, "B": WAITS, "C": WAITS}) == ("C",)


def test_a_model_that_no_longer_waits_gets_no_turn() -> None:
    turns = Turns(whole("AB"), MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": WAITS})
    assert turns.update(MIN_TURN_S, {"A": WORKS, "B": IDLE}) == ("A",)


def test_a_model_whose_replica_has_died_keeps_its_turn_until_it_runs_again() -> None:
    turns = Turns(whole("AB"), MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": WAITS})
    assert turns.update(MIN_TURN_S + 1, {"A": WAITS, "B": WAITS}) == ("A",)
    assert turns.update(MIN_TURN_S + 9, {"A": WORKS, "B": WAITS}) == ("B",)


def test_a_model_that_never_loads_gives_its_turn_back() -> None:
    requests = [Asked("A", 0.0, 100.0), Asked("B", 0.0, 1.0)]
    found = device(requests, whole("AB"), breaks="B", max_start_s=60.0)
    found.run(400)
    assert requests[0].is_done
    assert [model for _, model in found.begun][:3] == ["A", "B", "A"]


def test_a_model_whose_requests_got_their_error_gives_its_turn_back_at_once() -> None:
    turns = Turns(whole("AB"), MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": WAITS})
    turns.update(MIN_TURN_S, {"A": WORKS, "B": WAITS})
    assert turns.update(MIN_TURN_S + 20, {"A": WAITS, "B": WAITS}) == ("B",)
    assert turns.update(MIN_TURN_S + 21, {"A": WAITS, "B": IDLE}) == ("A",)


def test_a_new_controller_goes_on_with_the_model_that_runs() -> None:
    turns = Turns(whole("ABC"), MIN_TURN_S, 600)
    assert turns.update(0, {"A": WAITS, "B": WORKS, "C": WAITS}) == ("B",)


def test_at_the_start_the_first_model_that_shall_run_goes_first() -> None:
    starts = ModelState(is_running=False, is_wanted=True, has_work=False)
    assert Turns(whole("AB"), MIN_TURN_S, 600).update(0, {"A": starts, "B": starts}) == ("A",)


def test_a_pinned_model_keeps_its_turn_until_it_is_unpinned() -> None:
    pinned = ModelState(is_running=True, is_wanted=True, has_work=True, is_pinned=True)
    turns = Turns(whole("AB"), MIN_TURN_S, 600)
    assert turns.update(0, {"A": pinned, "B": WAITS}) == ("A",)
    assert turns.update(100 * MIN_TURN_S, {"A": pinned, "B": WAITS}) == ("A",)
    assert turns.update(100 * MIN_TURN_S + 1, {"A": RESTS, "B": WAITS}) == ("B",)


def test_a_pinned_model_that_never_loads_gives_its_turn_back() -> None:
    missing = ModelState(is_running=False, is_wanted=True, has_work=True, is_pinned=True)
    turns = Turns(whole("AB"), MIN_TURN_S, 600)
    assert turns.update(0, {"A": missing, "B": WAITS}) == ("A",)
    assert turns.update(599, {"A": missing, "B": WAITS}) == ("A",)
    assert turns.update(600, {"A": missing, "B": WAITS}) == ("B",)


def swapped_after(swap_s: float, turns: Turns, from_s: float) -> float:
    """Let A work and B wait from a time on; return when B, which takes so long to start, runs."""
    turns.update(from_s, {"A": WORKS, "B": WAITS})
    given_s = from_s + turns.min_turn_s
    assert turns.update(given_s, {"A": WORKS, "B": WAITS}) == ("B",)
    turns.update(given_s + swap_s / 2, {"A": WAITS, "B": WAITS})
    turns.update(given_s + swap_s, {"A": WAITS, "B": WORKS})
    return given_s + swap_s


@pytest.mark.parametrize(("swap_s", "least_s"), [(1, 10), (12, 36), (90, 120)])
def test_a_turn_lasts_three_times_the_measured_swap_within_bounds_unless_a_length_is_given(
    swap_s: float, least_s: float
) -> None:
    turns = Turns(whole("AB"), None, 600)
    assert turns.min_turn_s == 30, "nothing was measured yet"
    ran_s = swapped_after(swap_s, turns, 0)
    assert turns.min_turn_s == least_s
    assert turns.update(ran_s + least_s - 0.1, {"A": WAITS, "B": WORKS}) == ("B",)
    assert turns.update(ran_s + least_s, {"A": WAITS, "B": WORKS}) == ("A",)
    given = Turns(whole("AB"), 7, 600)
    swapped_after(swap_s, given, 0)
    assert given.min_turn_s == 7


def test_a_swap_that_took_long_once_is_not_what_swaps_take() -> None:
    turns = Turns(whole("ABC"), None, 600)
    now_s = 0.0
    for holder, swap_s in (("A", 8), ("B", 400), ("C", 8), ("A", 8)):
        states = {name: WAITS if name == holder else IDLE for name in "ABC"}
        assert turns.update(now_s, states) == (holder,)
        now_s += swap_s
        turns.update(now_s, states | {holder: WORKS})
        turns.update(now_s, states | {holder: RESTS})
    assert turns.min_turn_s == 24, "B's weights were downloaded"


def test_neither_a_model_that_ran_before_nor_one_that_was_asked_again_is_measured() -> None:
    turns = Turns(whole("AB"), None, 600)
    turns.update(0, {"A": WORKS, "B": IDLE})
    assert turns.min_turn_s == 30, "A ran before"
    turns.update(1, {"A": RESTS, "B": WAITS})
    turns.update(2, {"A": IDLE, "B": IDLE})
    turns.update(500, {"A": IDLE, "B": WAITS})
    turns.update(501, {"A": IDLE, "B": WORKS})
    assert turns.min_turn_s == 30, "nobody waited for B between"


HALVES = {"A": 0.5, "B": 0.5, "L": 0.9}
"""Two models that fit beside each other, and one that fits beside neither."""


def working(*names: str, waiting: str = "") -> dict[str, ModelState]:
    """Return the states of the models of `HALVES` and C: those work, and others wait."""
    return {name: WORKS if name in names else WAITS if name in waiting else IDLE for name in "ABCL"}


def test_parts_fit_together_up_to_the_whole_device_whatever_their_sum_is_rounded_to() -> None:
    assert fit_together([0.7, 0.2, 0.1])
    assert fit_together([0.1] * 10)
    assert not fit_together([0.5, 0.51])


def test_models_that_fit_together_run_at_the_same_time_and_take_turns_with_a_large_one() -> None:
    found = device([Asked(name, 0.0, 1e9) for name in "ABL"], HALVES)
    found.run(200)
    period = START_S + MIN_TURN_S
    assert found.begun == [
        (number * period, name) for number in range(6) for name in ("L" if number % 2 else "AB")
    ]


def test_three_halves_share_the_device_with_one_load_for_each_least_turn() -> None:
    found = device([Asked(name, 0.0, 1e9) for name in "ABC"], dict.fromkeys("ABC", 0.5))
    found.run(1000)
    assert found.num_loads <= 2 + 1000 / MIN_TURN_S
    late = [each for each in found.begun if each[0] > 100]
    assert {name for _, name in late} == set("ABC")
    assert all(after[1] != before[1] for before, after in pairwise(late))


def test_while_a_large_model_waits_small_ones_do_not_take_what_is_free() -> None:
    turns = Turns(HALVES, MIN_TURN_S, 600)
    assert turns.update(0, working("A")) == ("A",)
    assert turns.update(1, working("A", waiting="L")) == ("A",)
    assert turns.update(2, working("A", waiting="LB")) == ("A",)
    assert turns.update(MIN_TURN_S, working("A", waiting="LB")) == ("L",)


def test_a_turn_that_does_not_make_room_enough_goes_on() -> None:
    turns = Turns(HALVES, MIN_TURN_S, 600)
    turns.update(0, working("A"))
    assert turns.update(10, working("A", waiting="B")) == ("A", "B")
    turns.update(11, working("A", "B"))
    assert turns.update(12, working("A", "B", waiting="L")) == ("A", "B")
    assert turns.update(11 + MIN_TURN_S - 1, working("A", "B", waiting="L")) == ("A", "B")
    assert turns.update(11 + MIN_TURN_S, working("A", "B", waiting="L")) == ("L",)


def test_only_as_many_turns_end_as_a_model_needs_and_idle_ones_first() -> None:
    parts = {"A": 0.2, "B": 0.3, "C": 0.5, "L": 0.5}
    turns = Turns(parts, MIN_TURN_S, 600)
    assert turns.update(0, working("A", "B", "C")) == ("A", "B", "C")
    assert turns.update(MIN_TURN_S, working("A", "B", "C", waiting="L")) == ("C", "L")
    turns = Turns(parts, MIN_TURN_S, 600)
    turns.update(0, working("A", "B", "C"))
    idle_c = working("A", "B", waiting="L") | {"C": RESTS}
    assert turns.update(1, idle_c) == ("A", "B", "L"), "C has nothing to do"
    turns = Turns({"A": 0.2, "C": 0.8, "L": 0.5}, MIN_TURN_S, 600)
    turns.update(0, working("A", "C"))
    late = working("A", "C", waiting="L")
    assert turns.update(MIN_TURN_S, late) == ("A", "L"), "without C there is room beside A"


def test_a_model_that_fits_beside_a_pinned_one_does_not_wait_behind_one_that_does_not() -> None:
    turns = Turns(HALVES, MIN_TURN_S, 600)
    pinned = {"A": ModelState(is_running=True, is_wanted=True, has_work=True, is_pinned=True)}
    assert turns.update(0, working() | pinned) == ("A",)
    assert turns.update(1, working(waiting="L") | pinned) == ("A",)
    assert turns.update(2, working(waiting="LB") | pinned) == ("A", "B")
    assert turns.update(9 * MIN_TURN_S, working("B", waiting="L") | pinned) == ("A", "B")


def test_a_new_controller_goes_on_with_all_that_run_and_fit() -> None:
    assert Turns(HALVES, MIN_TURN_S, 600).update(0, working("A", "B", waiting="L")) == ("A", "B")
    swapping = Turns(HALVES, MIN_TURN_S, 600).update(0, working("B", "L", waiting="A"))
    assert swapping == ("B", "A"), "L and B have no room together, and B was the first"


@pytest.mark.parametrize("seed", range(60))
def test_whatever_fits_together_nobody_waits_for_more_turns_than_there_are_models(
    seed: int,
) -> None:
    chance = random.Random(seed)
    parts = {name: chance.choice((0.2, 0.3, 0.5, 0.7, 1.0)) for name in "ABCD"}
    requests = [
        Asked(chance.choice("AABCD"), round(chance.uniform(0, 240), 1), chance.uniform(1, 20))
        for _ in range(chance.choice((8, 20, 60)))
    ]
    found = device(requests, parts)
    found.run(3600)
    assert all(each.is_done for each in found.requests)
    assert max(each.turns_waited for each in found.requests) <= len(parts)
    assert found.longest_wait_s <= len(parts) * (START_S + MIN_TURN_S)
