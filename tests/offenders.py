"""One test for many cases of one rule: it goes through all, and names each that breaks the rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import pytest

MAX_LENGTH = 300
"""Of a case as a failure shows it."""


class Offenders:
    """Collects the cases that fail; the end of the block fails if there are any.

    ```
    with Offenders() as offenders:
        for case in CASES:
            with offenders.case(case):
                assert ...
    ```
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        self._num_cases = 0

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def case(self, *told: object) -> Iterator[None]:
        """Note an error of the block as this case's, and go on."""
        self._num_cases += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - told at the end
            name = ", ".join(map(repr, told))[:MAX_LENGTH]
            self._found.append(f"{name}\n    {type(error).__name__}: {error}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Fail if a case has failed, or if there was none."""
        if error is None:
            assert self._num_cases, "there is no case"
            assert not self._found, f"{len(self._found)} of {self._num_cases} cases:\n" + "\n".join(
                self._found
            )
