"""The pace on a device whose steps take a fixed time for decoding and for each prompt token."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from deployments.engine.scheduling.step_pace import FIRST_TOKENS, MIN_TOKENS, StepPace

DECODE_S = 0.03
TOKEN_S = 0.002


def steps(pace: StepPace, number: int, token_s: float = TOKEN_S) -> Iterator[int]:
    """Run steps with as many tokens of prompts as the pace allows; yield their numbers."""
    for _ in range(number):
        num_tokens = pace.max_prompt_tokens
        yield num_tokens
        pace.note(8, num_tokens, DECODE_S + num_tokens * token_s)


def decoded(pace: StepPace, decode_s: float = DECODE_S) -> StepPace:
    pace.note(8, 0, decode_s)
    return pace


def test_steps_take_as_long_as_they_may() -> None:
    pace = decoded(StepPace(0.2))
    assert list(steps(pace, 3))[-1] == pytest.approx(85, abs=1)


def test_they_do_so_without_a_step_that_only_decodes() -> None:
    assert list(steps(StepPace(0.2), 40))[-1] == pytest.approx(85, abs=3)


def test_the_number_of_tokens_at_most_doubles() -> None:
    numbers = list(steps(decoded(StepPace(2.0)), 6))
    assert numbers[0] == FIRST_TOKENS
    assert all(later <= 2 * earlier for earlier, later in pairwise(numbers))
    assert numbers[-1] == pytest.approx(985, abs=1)


def test_prompts_get_as_long_as_a_decode_step_where_that_takes_longer_than_allowed() -> None:
    pace = decoded(StepPace(0.02), decode_s=0.1)
    for _ in range(30):
        pace.note(8, pace.max_prompt_tokens, 0.1 + pace.max_prompt_tokens * TOKEN_S)
    assert pace.max_prompt_tokens == 50


def test_some_tokens_are_always_allowed() -> None:
    assert list(steps(decoded(StepPace(0.001)), 30, token_s=1.0))[-1] == MIN_TOKENS


def test_a_step_that_lost_its_core_is_forgotten() -> None:
    pace = decoded(StepPace(0.2))
    before = list(steps(pace, 10))[-1]
    pace.note(8, before, 3.0)
    assert pace.max_prompt_tokens < before / 2
    assert list(steps(pace, 20))[-1] == pytest.approx(before, abs=2)


def test_steps_of_prompts_alone_tell_what_a_token_takes() -> None:
    pace = decoded(StepPace(0.2))
    pace.note(0, 512, 512 * TOKEN_S)
    assert pace.max_prompt_tokens == 85


def test_the_clock_s_steps_may_take_no_time() -> None:
    pace = StepPace(0.2)
    pace.note(8, 64, 0.0)
    assert pace.max_prompt_tokens == 128
