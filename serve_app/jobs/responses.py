"""Stored responses: their rows in the store.

A response that its client waited for is one row, written when it has ended. One in the background
is there from the start. Like a batch, it is run by one ingress at a time, which holds its lease;
`response_log` has its events.

A response holds only its own input; `conversations` reads what came before.
"""

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Self

from deployments.contract.errors import JobConflictError, JobLimitError
from serve_app.config import JobsConfig
from serve_app.jobs.conversations import numbers_of
from serve_app.jobs.leases import FREE, Leases, free_at
from serve_app.jobs.response_log import IS_UNDER_WAY, UNDER_WAY, Group, insert_group, no_response
from serve_app.jobs.store import ERASED_AT_ONCE, Store


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response.

    Attributes:
        number: Its row's; later responses have higher ones.
        id: Names it.
        owner: See `store`.
        tenant: Whose its request is beside others; see `Standing`.
        previous: The number of the response that it follows; None if it begins a conversation.
        status: What has become of it, in OpenAI's words.
        items: Its own input, a list in JSON.
        body: OpenAI's object, in JSON; of one that has not ended, as it was when it was created.
        request: What the client has asked for, in JSON, without the input; None unless it is to run
            in the background and has not ended.
        seed: What its tokens are drawn with.
    """

    number: int
    id: str
    owner: str
    tenant: str
    previous: int | None
    status: str
    items: str
    body: str
    request: str | None
    seed: int

    @classmethod
    def of(cls, row: sqlite3.Row) -> Self:
        """Return the response of a row."""
        return cls(*(row[each.name] for each in fields(cls)))

    @property
    def is_background(self) -> bool:
        """Whether it was asked for in the background, so that its events are logged."""
        return bool(json.loads(self.body)["background"])

    @property
    def told(self) -> str:
        """OpenAI's object as it is now, in JSON."""
        return _with_status(self.body, self.status) if self.status in UNDER_WAY else self.body


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A response to store; see `StoredResponse`.

    Attributes:
        previous_id: The id of the response that it follows.
        events: The first group of its log; None unless it runs in the background.
    """

    id: str
    owner: str
    tenant: str
    previous_id: str | None
    status: str
    items: str
    body: str
    request: str | None = None
    seed: int = 0
    events: Group | None = None


class Responses:
    """The stored responses of all owners.

    Attributes:
        leases: Which ingress runs which, of those in the background.
    """

    def __init__(self, store: Store, config: JobsConfig) -> None:
        self.leases = Leases(store, "responses", IS_UNDER_WAY)
        self._store = store
        self._config = config

    async def require_room(self, owner: str) -> None:
        """Check that one more response may be stored; those that are being answered don't count.

        Raises:
            JobLimitError: The owner has too many, or too large ones.
            JobsUnavailableError: The store can't be read.
        """
        num_responses, num_bytes = await self._store.read(
            lambda connection: connection.execute(
                "SELECT count(*), ifnull(sum(num_bytes), 0) FROM responses WHERE owner = ?",
                (owner,),
            ).fetchone()
        )
        ways_out = (
            "Delete some (DELETE /v1/responses/{id}), or send store: false. Each is erased "
            "jobs.expires_after_s after its last use."
        )
        if num_responses >= self._config.max_num_responses:
            raise JobLimitError(
                f"There are {num_responses} stored responses, and no more are kept "
                f"(jobs.max_num_responses). {ways_out}"
            )
        if num_bytes >= self._config.max_responses_bytes:
            raise JobLimitError(
                f"The stored responses have {num_bytes} bytes, and no more are kept "
                f"(jobs.max_responses_bytes). {ways_out}"
            )

    async def add(self, new: NewResponse) -> None:
        """Store a response; those that it follows are kept as long as it is.

        Raises:
            PreviousResponseError: The one that it follows was erased meanwhile.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()
        expires_s = now_s + self._config.expires_after_s

        def add(connection: sqlite3.Connection) -> None:
            previous = None
            if new.previous_id is not None:
                chain = numbers_of(connection, new.owner, new.previous_id)
                previous = chain[0]
                connection.executemany(
                    "UPDATE responses SET expires_s = ? WHERE number = ?",
                    [(expires_s, number) for number in chain],
                )
            group = new.events
            texts = (new.items, new.body, new.request or "", "" if group is None else group.events)
            number = connection.execute(
                "INSERT INTO responses (id, owner, tenant, previous, status, items, body, "
                "request, seed, num_bytes, created_s, expires_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    new.id,
                    new.owner,
                    new.tenant,
                    previous,
                    new.status,
                    new.items,
                    new.body,
                    new.request,
                    new.seed,
                    sum(len(text.encode()) for text in texts),
                    now_s,
                    expires_s,
                ),
            ).lastrowid
            assert number is not None, "it was inserted"
            if group is not None:
                insert_group(connection, number, group)

        await self._store.write(add)

    async def find(self, owner: str, id_: str) -> StoredResponse:
        """Return a response.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobsUnavailableError: The store can't be read.
        """
        return await self._store.read(lambda connection: _of_owner(connection, owner, id_))

    async def delete(self, owner: str, id_: str) -> None:
        """Erase a response; one that runs is aborted.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobsUnavailableError: The store can't be written.
        """
        await self._store.write(
            lambda connection: _erase(connection, [_of_owner(connection, owner, id_).number])
        )

    async def cancel(self, owner: str, id_: str) -> StoredResponse:
        """End a response in the background; one that has ended stays as it is.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobConflictError: It does not run in the background.
            JobsUnavailableError: The store can't be written.
        """

        def cancel(connection: sqlite3.Connection) -> StoredResponse:
            found = _of_owner(connection, owner, id_)
            if found.status not in UNDER_WAY:
                if not found.is_background:
                    raise JobConflictError(
                        "Only a response with background: true can be cancelled."
                    )
                return found
            connection.execute(
                "UPDATE responses SET status = 'cancelled', body = ?, request = NULL, "
                "lease_owner = NULL WHERE number = ?",
                (_with_status(found.body, "cancelled"), found.number),
            )
            return _of_owner(connection, owner, id_)

        return await self._store.write(cancel)

    async def claim(
        self, ingress: str, beside: Collection[int], owners: Sequence[str], most: int
    ) -> list[StoredResponse]:
        """Take the leases of responses that no living ingress runs.

        Args:
            ingress: Who takes them.
            beside: The numbers of those that this ingress runs; none of them is taken.
            owners: Their owners. Each next one is taken of an owner of whom the fewest run.
            most: How many to take.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def free(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            rows = connection.execute(
                f"SELECT number, owner FROM responses WHERE {IS_UNDER_WAY} AND {FREE} "
                "ORDER BY number",
                free_at(now_s),
            ).fetchall()
            return [row for row in rows if row["number"] not in beside]

        if most <= 0 or not await self._store.read(free):
            return []

        def claim(connection: sqlite3.Connection) -> list[StoredResponse]:
            rows, running = free(connection), list(owners)
            taken: list[int] = []
            while rows and len(taken) < most:
                row = min(rows, key=lambda row: running.count(row["owner"]))
                rows.remove(row)
                running.append(row["owner"])
                taken.append(row["number"])
            return [
                StoredResponse.of(self.leases.take(connection, ingress, number, now_s))
                for number in taken
            ]

        return await self._store.write(claim)

    async def expire(self) -> None:
        """Erase responses that nobody has used for long.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def expire(connection: sqlite3.Connection) -> int:
            rows = connection.execute(
                "SELECT number FROM responses WHERE expires_s < ? LIMIT ?", (now_s, ERASED_AT_ONCE)
            ).fetchall()
            _erase(connection, [row["number"] for row in rows])
            return len(rows)

        while await self._store.write(expire) == ERASED_AT_ONCE:
            pass


def _erase(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    for number in numbers:
        connection.execute("DELETE FROM response_events WHERE response = ?", (number,))
        connection.execute("DELETE FROM responses WHERE number = ?", (number,))


def _of_owner(connection: sqlite3.Connection, owner: str, id_: str) -> StoredResponse:
    row = connection.execute(
        "SELECT * FROM responses WHERE id = ? AND owner = ?", (id_, owner)
    ).fetchone()
    if row is None:
        raise no_response(id_)
    return StoredResponse.of(row)


def _with_status(body: str, status: str) -> str:
    return json.dumps({**json.loads(body), "status": status}, ensure_ascii=False)
