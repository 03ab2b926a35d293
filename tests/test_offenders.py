import pytest

from tests.offenders import every


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
