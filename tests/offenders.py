"""One test for many cases of one rule: it goes through all, and names each that breaks the rule."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import iscoroutinefunction, signature
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

MAX_LENGTH = 300
"""Of a case as a failure shows it."""


def for_each(*cases: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test's body with each case, as `every` does; its fixtures are made once.

    A case fills the test's first parameters: a tuple one with each of its values, anything else the
    first. All other parameters are fixtures.

    ```
    @for_each(
        ({"n": 0}, 400),
        ({"n": 1}, 200),
    )
    async def test_n_is_bounded(body: dict[str, int], status: int, client: Client) -> None:
    ```
    """
    rows = [case if type(case) is tuple else (case,) for case in cases]
    (num_values,) = {len(row) for row in rows}  # all cases have as many, and there is one

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            for case in every(rows):
                with case as values:
                    test(*values, **fixtures)

        @wraps(test)
        async def run_async(**fixtures: Any) -> None:
            for case in every(rows):
                with case as values:
                    await test(*values, **fixtures)

        decorated: Callable[..., Any] = run_async if iscoroutinefunction(test) else run
        own = signature(test)
        fixtures = list(own.parameters.values())[num_values:]
        # Pytest asks for the fixtures that it finds here.
        vars(decorated)["__signature__"] = own.replace(parameters=fixtures)
        return decorated

    return decorate


def every(cases: Iterable[T]) -> Iterator[AbstractContextManager[T]]:
    """Go through all cases; fail after the last one if any has failed, or if there was none.

    For cases that the test itself makes; `for_each` is for all others.

    ```
    for case in every(cases):
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
