"""Leases: which ingress runs which job.

An ingress claims a job by taking its lease, and renews it while it runs the job. A lease that is
not renewed runs out, so the jobs of an ingress that has died are claimed by others. It is a fence,
too: what an ingress writes of a job goes into a transaction that checks whether it holds the lease.
"""

import sqlite3
from collections.abc import Collection
from typing import Final

from serve_app.jobs.store import Store

LEASE_S: Final = 15.0
"""How long an ingress keeps a job without a sign of life. A pause of the process, or a slow disk,
may take longer: another ingress then runs the job, and what the first one writes is refused."""

FREE: Final = "(lease_owner IS NULL OR NOT (lease_until_s > ? AND lease_until_s <= ?))"
"""The condition that no living ingress holds a job, with the values of `free_at`."""


def free_at(now_s: float) -> tuple[float, float]:
    """Return the values of `FREE`: when a lease has run out, and how far one can reach.

    One that reaches further was taken before the clock was set back. Its ingress, if it lives, has
    shortened it by its next renewal.
    """
    return now_s, now_s + 2 * LEASE_S


class LeaseLostError(Exception):
    """The job is another ingress's now, or has ended: leave it."""


class Leases:
    """The leases of all jobs of one table."""

    def __init__(self, store: Store, table: str, under_way: str) -> None:
        """Name the table.

        Args:
            store: Holds it.
            table: Has the columns number, lease_owner and lease_until_s.
            under_way: The condition that holds for jobs that have not ended.
        """
        self._store = store
        self._table = table
        self._under_way = under_way

    def take(
        self, connection: sqlite3.Connection, ingress: str, number: int, now_s: float
    ) -> sqlite3.Row:
        """Give an ingress the lease of the job of this number, which is free; return its row."""
        row: sqlite3.Row = connection.execute(
            f"UPDATE {self._table} SET lease_owner = ?, lease_until_s = ? WHERE number = ? "
            "RETURNING *",
            (ingress, now_s + LEASE_S, number),
        ).fetchone()
        return row

    async def renew(self, ingress: str, numbers: Collection[int]) -> list[sqlite3.Row]:
        """Keep the leases of jobs, and return the rows of those that the ingress still holds.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        until_s = self._store.unix_s() + LEASE_S
        return await self._store.write(
            lambda connection: connection.execute(
                f"UPDATE {self._table} SET lease_until_s = ? WHERE lease_owner = ? "
                f"AND {self._under_way} AND number IN ({', '.join('?' * len(numbers))}) "
                "RETURNING *",
                (until_s, ingress, *numbers),
            ).fetchall()
        )

    async def release(self, ingress: str) -> None:
        """Give up all leases of an ingress.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        await self._store.write(
            lambda connection: connection.execute(
                f"UPDATE {self._table} SET lease_owner = NULL, lease_until_s = 0 "
                f"WHERE lease_owner = ? AND {self._under_way}",
                (ingress,),
            )
        )

    async def give_back(self, ingress: str, number: int) -> None:
        """Give up the lease of one job, which then comes after those that wait for longer.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()
        await self._store.write(
            lambda connection: connection.execute(
                f"UPDATE {self._table} SET lease_owner = NULL, lease_until_s = ? "
                "WHERE number = ? AND lease_owner = ?",
                (now_s, number, ingress),
            )
        )
