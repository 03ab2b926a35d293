"""Runs batches at a server with OpenAI's API: uploads a file, waits, and reads what came of it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

from serve_app.client.chat_client import ChatClient, ChatError


@dataclass(frozen=True, slots=True)
class BatchState:
    """How far a batch is.

    Attributes:
        id: Its id.
        status: OpenAI's word.
        total: Its requests; 0 while they are counted.
        completed: Those with an answer.
        failed: Those with an error.
        output_file_id: The answers, once there are any.
        error_file_id: The errors, likewise.
        fault: Why it has failed as a whole; empty if it has not.
    """

    id: str
    status: str
    total: int
    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None
    fault: str

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """Return what a server tells.

        Raises:
            ChatError: It is no batch.
        """
        try:
            counts = told.get("request_counts") or {}
            errors = (told.get("errors") or {}).get("data") or ()
            return cls(
                str(told["id"]),
                str(told["status"]),
                int(counts.get("total", 0)),
                int(counts.get("completed", 0)),
                int(counts.get("failed", 0)),
                told.get("output_file_id"),
                told.get("error_file_id"),
                "; ".join(str(each.get("message")) for each in errors),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ChatError("the server's answer is no batch") from error

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """Asks one server about batches."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    async def upload(self, file: Path) -> str:
        """Upload a file, and return its id.

        Raises:
            ChatError: It was refused, or the server can't be asked.
            OSError: The file can't be read.
        """
        with file.open("rb") as contents:
            form = aiohttp.FormData()
            form.add_field("purpose", "batch")
            form.add_field("file", contents, filename=file.name)
            return str((await self._client.post("/files", form)).get("id"))

    async def create(self, file_id: str, endpoint: str, window: str) -> BatchState:
        """Start a batch of an uploaded file.

        Raises:
            ChatError: It was refused, or the server can't be asked.
        """
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return BatchState.of(await self._client.post("/batches", body))

    async def find(self, id_: str) -> BatchState:
        """Return how far a batch is.

        Raises:
            ChatError: There is none, or the server can't be asked.
        """
        return BatchState.of(await self._client.get(f"/batches/{id_}"))

    def contents(self, file_id: str) -> AsyncIterator[bytes]:
        """Return the contents of a file, piece by piece.

        Raises:
            ChatError: There is none, or the server can't be asked.
        """
        return self._client.pieces(f"/files/{file_id}/content")
