"""A client of batches that outlasts faults: creates them, follows them, reads their results."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

DEADLINE_S = 900
POLL_S = 0.02
ENDED = ("completed", "failed", "expired", "cancelled")

OF_THE_RUN: Final = ("id", "created")
"""Fields of an answer that depend on its batch and on the time."""


@dataclass(frozen=True)
class LineResult:
    """What became of a line, but for what depends on its batch, the time and caches.

    Attributes:
        custom_id: The client's name for it; None if the line could not be read.
        status: The HTTP status; None if no route was asked.
        answer: The answer, or the error.
    """

    custom_id: str | None
    status: int | None
    answer: object


def jsonl(lines: Iterable[Mapping[str, Any] | str]) -> str:
    """Return a file of lines; those that are text already stay as they are."""
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


class BatchClient:
    """A client of one server, or of one of its ingresses; what fails is asked again."""

    def __init__(self, client: httpx.AsyncClient, url: str = "") -> None:
        """Take a client, and the address of the server if the client does not know it."""
        self._client = client
        self._url = url

    async def create(self, endpoint: str, text: str) -> str:
        """Upload lines and have them run; return the batch's id."""
        file = await self._client.post(
            f"{self._url}/v1/files",
            data={"purpose": "batch"},
            files={"file": ("lines.jsonl", text.encode())},
        )
        assert file.status_code == 200, file.text
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": endpoint,
            "completion_window": "24h",
        }
        batch = await self._client.post(f"{self._url}/v1/batches", json=body)
        assert batch.status_code == 200, batch.text
        return str(batch.json()["id"])

    async def until(self, id_: str, num_done: int | None = None) -> dict[str, Any]:
        """Return a batch once it has so many results, or has ended."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                batch: dict[str, Any] = json.loads(await self._get(f"/v1/batches/{id_}"))
                counts = batch["request_counts"]
                num_found = counts["completed"] + counts["failed"]
                if batch["status"] in ENDED or (num_done is not None and num_found >= num_done):
                    return batch
                await asyncio.sleep(POLL_S)

    async def results(self, batch: Mapping[str, Any]) -> dict[int, LineResult]:
        """Return the result of each line by its number, from 1; none has two."""
        found: dict[int, LineResult] = {}
        for kind in ("output_file_id", "error_file_id"):
            if batch[kind] is None:
                continue
            for text in (await self._get(f"/v1/files/{batch[kind]}/content")).splitlines():
                result = json.loads(text)
                number = int(result["id"].rpartition("_")[2])
                assert number not in found, text
                found[number] = _line_result(result)
        return found

    async def _get(self, path: str) -> str:
        """Return what the server answers, as soon as it does."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    answer = await self._client.get(self._url + path)
                except httpx.TransportError:  # who was asked is dead, or not there yet
                    answer = None
                if answer is not None and answer.status_code == 200:
                    return answer.text
                assert answer is None or answer.status_code >= 500, answer.text
                await asyncio.sleep(POLL_S)


def _line_result(result: Mapping[str, Any]) -> LineResult:
    response = result["response"]
    if response is None:
        return LineResult(result["custom_id"], None, result["error"])
    answer = {name: value for name, value in response["body"].items() if name not in OF_THE_RUN}
    # How much of a prompt was in a cache depends on what the replica has computed before.
    if "usage" in answer:
        answer["usage"] = {**answer["usage"], "prompt_tokens_details": None}
    return LineResult(result["custom_id"], response["status_code"], answer)
