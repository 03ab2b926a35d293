from inspect import signature

import pytest

from tests.offenders import every, for_each


def test_every_case_that_fails_is_named_and_no_other() -> None:
    def check() -> None:
        for case in every([(f"number {number}", number) for number in range(4)]):
            with case as (_name, number):
                assert number != 1
                if number == 3:
                    pytest.fail("it is three")

    with pytest.raises(AssertionError, match="2 of 4 cases") as caught:
        check()
    told = str(caught.value)
    assert [number for number in range(4) if f"number {number}" in told] == [1, 3]
    assert "it is three" in told


def test_cases_that_all_hold_are_no_failure_and_no_case_at_all_is() -> None:
    assert len(list(every(["fine", "good"]))) == 2
    with pytest.raises(AssertionError, match="no case"):
        list(every([]))


async def test_a_case_fills_the_first_parameters_and_fixtures_the_others() -> None:
    @for_each((1, "a"), (2, "b"))
    async def check(number: int, name: str, seen: list[tuple[int, str]]) -> None:
        seen.append((number, name))

    @for_each(1, 2, 3)
    def check_odd(number: int) -> None:
        assert number % 2

    seen: list[tuple[int, str]] = []
    await check(seen=seen)
    assert seen == [(1, "a"), (2, "b")]
    assert list(signature(check).parameters) == ["seen"]
    with pytest.raises(AssertionError, match="1 of 3 cases"):
        check_odd()


def test_cases_that_fill_different_parameters_and_no_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        for_each(1, (1, 2))
    with pytest.raises(ValueError, match="not enough"):
        for_each()
