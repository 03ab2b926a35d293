"""Conversations: the chains that stored responses make by following each other.

A response holds only its own input and output, and the number of the one that it follows, so a
conversation is read by going back through its responses. One of them that was erased breaks it.
"""

import json
import sqlite3
from contextlib import closing
from typing import Any, Final

from deployments.contract.errors import (
    InvalidRequestError,
    JobConflictError,
    PreviousResponseError,
)
from serve_app.jobs.response_log import UNDER_WAY, no_response
from serve_app.jobs.store import Store

FOLLOWED: Final = ("completed", "incomplete")
"""The states of a response that another may follow."""

PREVIOUS: Final = "previous_response_id"


class Conversations:
    """The conversations of all owners. Their items are OpenAI's, as objects of JSON."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def up_to(self, owner: str, id_: str, max_bytes: int) -> list[dict[str, Any]]:
        """Return what a request that follows a response goes on from, the oldest item first.

        Args:
            owner: The response's.
            id_: The response's.
            max_bytes: How large the conversation may be.

        Raises:
            PreviousResponseError: The owner has no response of this id, or one before it was
                erased.
            InvalidRequestError: It can't be followed, or the conversation is too long.
            JobsUnavailableError: The store can't be read.
        """

        def up_to(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            turns, num_bytes, last = list[list[dict[str, Any]]](), 0, None
            with closing(_chain(connection, owner, id_, ", items, body, status")) as rows:
                for last in rows:
                    if last["status"] not in FOLLOWED:
                        raise JobConflictError(
                            f"The response is {last['status']}, so no other can follow it yet."
                            if last["status"] in UNDER_WAY
                            else f"The response is {last['status']}, so no other can follow it.",
                            PREVIOUS,
                        )
                    turns.append(_turn(last))
                    num_bytes += len(last["items"]) + sum(len(str(item)) for item in turns[-1])
                    if num_bytes > max_bytes:
                        raise InvalidRequestError(
                            "The conversation before this request is larger than a body may be "
                            f"({max_bytes} bytes, limits.max_body_bytes). Begin a new one.",
                            PREVIOUS,
                        )
            if last is None:
                raise _no_previous(id_)
            if last["previous"] is not None:
                raise PreviousResponseError(
                    "A response earlier in this conversation was deleted, or has expired. Send the "
                    "whole conversation as input.",
                    PREVIOUS,
                )
            return [item for turn in reversed(turns) for item in turn]

        return await self._store.read(up_to)

    async def before(self, owner: str, id_: str) -> list[dict[str, Any]]:
        """Return what a response in the background goes on from, the oldest item first.

        Raises:
            PreviousResponseError: A response before it was erased.
            JobsUnavailableError: The store can't be read.
        """

        def before(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            rows = list(_chain(connection, owner, id_, ", items, body"))
            if not rows or rows[-1]["previous"] is not None:
                raise PreviousResponseError(
                    "A response earlier in this conversation was deleted, or has expired.", PREVIOUS
                )
            return [item for row in reversed(rows[1:]) for item in _turn(row)]

        return await self._store.read(before)

    async def input_items(self, owner: str, id_: str) -> list[dict[str, Any]]:
        """Return a response's input, the oldest item first: all that is kept of the conversation.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobsUnavailableError: The store can't be read.
        """

        def input_items(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            rows = list(_chain(connection, owner, id_, ", items, body"))
            if not rows:
                raise no_response(id_)
            past = [item for row in reversed(rows[1:]) for item in _turn(row)]
            return [*past, *json.loads(rows[0]["items"])]

        return await self._store.read(input_items)


def numbers_of(connection: sqlite3.Connection, owner: str, id_: str) -> list[int]:
    """Return the numbers of a response and of those that it follows, the newest first.

    Raises:
        PreviousResponseError: The owner has no response of this id.
    """
    numbers = [row["number"] for row in _chain(connection, owner, id_, "")]
    if not numbers:
        raise _no_previous(id_)
    return numbers


def _chain(connection: sqlite3.Connection, owner: str, id_: str, columns: str) -> sqlite3.Cursor:
    """Return a response and those that it follows, the newest first.

    Args:
        connection: The database.
        owner: The response's.
        id_: The response's.
        columns: Those of `responses` to return besides number and previous.
    """
    return connection.execute(
        "WITH RECURSIVE chain (number, previous) AS ("
        "SELECT number, previous FROM responses WHERE id = ? AND owner = ? "
        "UNION ALL SELECT each.number, each.previous FROM chain "
        "JOIN responses AS each ON each.number = chain.previous) "
        f"SELECT each.number, each.previous{columns} FROM chain "
        "JOIN responses AS each ON each.number = chain.number ORDER BY chain.number DESC",
        (id_, owner),
    )


def _turn(row: sqlite3.Row) -> list[dict[str, Any]]:
    """Return the items that a response has added to its conversation."""
    return [*json.loads(row["items"]), *json.loads(row["body"])["output"]]


def _no_previous(id_: str) -> PreviousResponseError:
    return PreviousResponseError(
        f"There is no response {id_[:64]!r}. It may have been sent with store: false, deleted, or "
        "expired: send the whole conversation as input.",
        PREVIOUS,
    )
