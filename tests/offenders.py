"""One test for many cases of one rule: it goes through all, and names each that breaks the rule."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import pytest

T = TypeVar("T")

MAX_LENGTH = 300
"""Of a case as a failure shows it."""


def every(cases: Iterable[T]) -> Iterator[AbstractContextManager[T]]:
    """Go through all cases; fail after the last one if any has failed, or if there was none.

    ```
    for case in every(CASES):
        with case as (body, status):
            assert ...
    ```
    """
    offenders: list[str] = []
    num_cases = 0
    for case in cases:
        num_cases += 1
        yield _noted(case, offenders)
    assert num_cases, "there is no case"
    assert not offenders, f"{len(offenders)} of {num_cases} cases:\n" + "\n".join(offenders)


@contextmanager
def _noted(case: T, offenders: list[str]) -> Iterator[T]:
    """Note an error of the block as this case's, and go on."""
    try:
        yield case
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - told at the end
        name = repr(case)[:MAX_LENGTH]
        offenders.append(f"{name}\n    {type(error).__name__}: {error}")
