"""The log of the events of responses in the background.

Events are logged in groups, each with what they were made of, so that an ingress that takes a
response over goes on behind the last token that anybody can have read: nobody reads what is not
logged. Only the holder of a response's lease writes to its log, in the transaction that checks the
lease.
"""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from deployments.contract.errors import JobNotFoundError
from serve_app.jobs.store import Store

UNDER_WAY: Final = ("queued", "in_progress")
"""The states of a response in the background that has not ended."""

IS_UNDER_WAY: Final = "status IN ('queued', 'in_progress')"
"""The same as a condition; SQLite then takes the index of these rows."""

GROUPS_AT_ONCE: Final = 64
"""Groups that a client's stream reads at a time; each has at most what came in one flush."""


@dataclass(frozen=True, slots=True)
class Group:
    """Events of a response that are logged together.

    Attributes:
        first: The number of the first event.
        num_events: How many there are.
        events: The framed events.
        replay: What they were made of, in JSON; the surface reads it.
    """

    first: int
    num_events: int
    events: str
    replay: str


@dataclass(frozen=True, slots=True)
class End:
    """How a response ended: its status, and OpenAI's object in JSON."""

    status: str
    body: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What the holder of a response's lease adds to its log.

    Attributes:
        response: The response's number.
        group: The events.
        end: How it ended with them; None if it goes on.
    """

    response: int
    group: Group
    end: End | None = None


class ResponseLog:
    """The events of the responses of all owners."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def events(self, owner: str, id_: str, after: int) -> tuple[list[Group], bool]:
        """Return groups that follow an event, some at a time, and whether no more will come.

        Args:
            owner: The response's.
            id_: The response's.
            after: The number of an event; of the first group only those behind it may be new.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobsUnavailableError: The store can't be read.
        """

        def events(connection: sqlite3.Connection) -> tuple[list[Group], bool]:
            row = connection.execute(
                "SELECT number, status FROM responses WHERE id = ? AND owner = ?", (id_, owner)
            ).fetchone()
            if row is None:
                raise no_response(id_)
            groups = _groups(
                connection,
                "response = ? AND number + num_events - 1 > ?",
                (row["number"], after),
                GROUPS_AT_ONCE,
            )
            return groups, row["status"] not in UNDER_WAY and len(groups) < GROUPS_AT_ONCE

        return await self._store.read(events)

    async def groups(self, response: int) -> list[Group]:
        """Return all groups of the response of this number.

        Raises:
            JobsUnavailableError: The store can't be read.
        """
        return await self._store.read(
            lambda connection: _groups(connection, "response = ?", (response,), -1)
        )

    async def append(self, ingress: str, entries: Iterable[Entry]) -> set[int]:
        """Add to the logs of several responses, in order; return those whose leases are lost.

        Nothing was added to these.

        Raises:
            JobsUnavailableError: The store can't be written; nothing was added.
        """

        def log(connection: sqlite3.Connection) -> set[int]:
            lost: set[int] = set()
            for each in entries:
                if each.response in lost or not _advanced(connection, ingress, each):
                    lost.add(each.response)
                else:
                    insert_group(connection, each.response, each.group)
            return lost

        return await self._store.write(log)


def _advanced(connection: sqlite3.Connection, ingress: str, entry: Entry) -> bool:
    """Note what an entry says of its response; return False if the ingress does not hold it."""
    end, num_bytes = entry.end, len(entry.group.events) + len(entry.group.replay)
    held = f"WHERE number = ? AND lease_owner = ? AND {IS_UNDER_WAY}"
    if end is None:
        change = "status = 'in_progress', num_bytes = num_bytes + ?"
        values: tuple[Any, ...] = (num_bytes,)
    else:
        change = (
            "status = ?, body = ?, num_bytes = num_bytes + ?, request = NULL, lease_owner = NULL"
        )
        values = (end.status, end.body, num_bytes + len(end.body))
    found = connection.execute(
        f"UPDATE responses SET {change} {held}", (*values, entry.response, ingress)
    )
    return found.rowcount == 1


def insert_group(connection: sqlite3.Connection, response: int, group: Group) -> None:
    """Add a group to the log of the response of this number."""
    connection.execute(
        "INSERT INTO response_events (response, number, num_events, events, replay) "
        "VALUES (?, ?, ?, ?, ?)",
        (response, group.first, group.num_events, group.events, group.replay),
    )


def _groups(
    connection: sqlite3.Connection, condition: str, values: tuple[Any, ...], most: int
) -> list[Group]:
    rows = connection.execute(
        "SELECT number, num_events, events, replay FROM response_events "
        f"WHERE {condition} ORDER BY number LIMIT ?",
        (*values, most),
    )
    return [Group(*row) for row in rows]


def no_response(id_: str) -> JobNotFoundError:
    """Return the refusal of an id that an owner has no response of."""
    return JobNotFoundError(f"There is no response {id_[:64]!r}.")
