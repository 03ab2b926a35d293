"""Suspects that wait for the go-aheads of their ingresses."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel import go_ahead as module
from deployments.channel.go_ahead import GoAheads
from tests.deadline import in_time
from tests.stopped_clock import Clock, settle


@in_time
async def test_a_suspect_begins_when_it_gets_its_go_ahead() -> None:
    go_aheads = GoAheads()
    with go_aheads.expect() as mine, go_aheads.expect() as other:
        waiting = asyncio.ensure_future(mine.is_given())
        go_aheads.give(other.number)
        await settle()
        assert not waiting.done()
        go_aheads.give(mine.number)
        assert await waiting


@in_time
async def test_a_go_ahead_that_does_not_come_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.0)
    with GoAheads().expect() as mine:
        assert not await mine.is_given()


@in_time
async def test_a_replica_that_hangs_while_it_waits_does_not_give_up(advance: Clock) -> None:
    go_aheads = GoAheads()
    with go_aheads.expect() as mine:
        waiting = asyncio.ensure_future(mine.is_given())
        await settle()
        advance(3600)
        await settle()
        go_aheads.give(mine.number)
        assert await waiting


@given(st.lists(st.integers(-3, 12), max_size=30), st.integers(0, 8))
async def test_only_those_begin_whose_numbers_are_given_while_they_wait(
    numbers: list[int], num_suspects: int
) -> None:
    go_aheads = GoAheads()
    with ExitStack() as stack:
        waiting = [stack.enter_context(go_aheads.expect()) for _ in range(num_suspects)]
        for number in numbers:
            go_aheads.give(number)
        for each in waiting:
            assert each._given.done() is (each.number in numbers)
    assert not go_aheads._expected
    for number in numbers:  # too late
        go_aheads.give(number)
    with go_aheads.expect() as later:
        assert later.number == num_suspects, "no number is used twice"
        assert not later._given.done()
