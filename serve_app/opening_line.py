"""The line in front of a model: requests that wait until replicas are asked to take them.

Asking is most of what a refusal costs, and when there is no room hundreds may want to ask at once.
So a bounded number asks at the same time, in the order in which they came, and the answer that not
even one more is admitted speaks for all who stood in line when the question was sent: had they
asked in that moment, they would have been told the same. It says nothing to those who came later,
so nobody is refused by what was true before he came.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from deployments.errors import OverloadedError

T = TypeVar("T")

MAX_NUM_ASKING: Final = 32
"""As many as a replica tokenizes in one call; of more, some would only wait there instead."""


class FullError(OverloadedError):
    """There is no room for even one request more.

    Attributes:
        replica_id: Which replica has said so.
    """

    def __init__(self, message: str, retry_after_s: float | None, replica_id: str) -> None:
        """Keep what the replica has said."""
        super().__init__(message, None, retry_after_s)
        self.replica_id = replica_id


class OpeningLine:
    """Lets requests ask, each in its turn."""

    def __init__(
        self, count_unasked: Callable[[], object], max_num_asking: int = MAX_NUM_ASKING
    ) -> None:
        """Start with nobody in line.

        Args:
            count_unasked: Is called for each request that is refused by another one's answer; no
                replica knows of it.
            max_num_asking: Requests that may ask at the same time.
        """
        self._count_unasked = count_unasked
        self._turns = asyncio.Semaphore(max_num_asking)
        self._num_come = 0
        self._num_meant = 0  # the latest refusal means those who came first, so many
        self._refusal: FullError | None = None

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what asking returns, as soon as it is this request's turn.

        Args:
            ask: Shows the request to the replicas; raises `FullError` if all of them are full.

        Raises:
            FullError: They are, or one who asked while this request stood in line was told so.
        """
        self._num_come += 1
        place = self._num_come
        async with self._turns:
            if self._refusal is not None and place <= self._num_meant:
                self._count_unasked()
                raise FullError(
                    self._refusal.message, self._refusal.retry_after_s, self._refusal.replica_id
                )
            num_come = self._num_come
            try:
                return await ask()
            except FullError as refusal:
                if num_come > self._num_meant:
                    self._num_meant, self._refusal = num_come, refusal
                raise
