"""Batches of four kinds side by side, with bad lines among the good ones."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.faults.batch_client import ENDED, BatchClient, LineResult, jsonl
from tests.faults.served.kinds import ROW

CHAT: Final = "/v1/chat/completions"
BATCH: Final = "batch"
HELD: Final = f"held-{BATCH}-"
"""How messages begin: a `FragileGenerator` answers them slowly until `BATCH` is released."""


@dataclass(frozen=True)
class Kind:
    """What the lines of a batch ask: its endpoint, and the body of each line by its number."""

    endpoint: str
    body: Callable[[int], dict[str, Any]]


def _chat(at: int) -> dict[str, Any]:
    return {
        "model": "pydoc-chat",
        "messages": [{"role": "user", "content": f"{HELD}What does the function number {at} do?"}],
        "temperature": 1.2,
        "seed": at,
        "max_tokens": 240,
        "ignore_eos": True,
    }


def _json_schema(at: int) -> dict[str, Any]:
    schema = {"name": "row", "schema": ROW}
    return {
        "model": "pydoc-chat",
        "messages": [{"role": "user", "content": f"{HELD}Rate the function number {at}."}],
        "temperature": 0 if at % 2 else 1.2,
        "seed": at,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def _text(at: int) -> str:
    return f"Function number {at} returns the path of a file. " * (1 + at % 7)


def _classify(at: int) -> dict[str, Any]:
    return {"model": "pydoc-detector", "input": _text(at)}


def _embeddings(at: int) -> dict[str, Any]:
    return {"model": "pydoc-search", "input": _text(at)}


KINDS: Final[Mapping[str, Kind]] = {
    "chat": Kind(CHAT, _chat),
    "json_schema": Kind(CHAT, _json_schema),
    "classify": Kind("/v1/classify", _classify),
    "embeddings": Kind("/v1/embeddings", _embeddings),
}


def _bad_lines(kind: Kind) -> list[dict[str, Any] | str]:
    def line(custom_id: str, body: dict[str, Any], url: str = kind.endpoint) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    return [
        '{"custom_id": "half a line", "method": "POS',
        line("another route", kind.body(0), "/v1/models"),
        line("line 0", kind.body(0)),  # the name of an earlier line
        line("streamed", {**kind.body(0), "stream": True}),
        line("nothing asked", {}),
    ]


NUM_BAD: Final = len(_bad_lines(KINDS["chat"]))
"""The bad lines of each batch."""


def lines_of(kind: Kind, num_good: int) -> str:
    """Return a batch's file: so many good lines, and the bad ones among them."""
    bad = _bad_lines(kind)
    lines: list[dict[str, Any] | str] = []
    for at in range(num_good):
        body = kind.body(at)
        lines.append(
            {"custom_id": f"line {at}", "method": "POST", "url": kind.endpoint, "body": body}
        )
        lines += bad[at * len(bad) // num_good : (at + 1) * len(bad) // num_good]
    return jsonl(lines)


@dataclass(frozen=True)
class Outcome:
    """How a batch has ended.

    Attributes:
        status: Its state.
        counts: Its lines: `total`, `completed` and `failed`.
        results: Their results by the lines' numbers.
    """

    status: str
    counts: Mapping[str, int]
    results: Mapping[int, LineResult]


@dataclass
class BatchLoad:
    """One batch of each kind.

    Attributes:
        client: Asks the server.
        num_good: The good lines of each kind.
        ids: The batches, once they are started.
    """

    client: BatchClient
    num_good: Mapping[str, int]
    ids: dict[str, str] = field(default_factory=dict)

    async def start(self) -> None:
        """Create the batches."""
        for name, num_good in self.num_good.items():
            kind = KINDS[name]
            text = lines_of(kind, num_good)
            self.ids[name] = await self.client.create(kind.endpoint, text)

    async def until(self, share: float) -> int:
        """Wait until this share of all lines has results; return how many batches still run."""
        num_lines = sum(self.num_good.values()) + NUM_BAD * len(self.num_good)
        while True:
            batches = await self._batches()
            num_done = sum(
                each["request_counts"]["completed"] + each["request_counts"]["failed"]
                for each in batches
            )
            if num_done >= share * num_lines:
                return sum(each["status"] not in ENDED for each in batches)
            await asyncio.sleep(0.1)

    async def outcomes(self) -> dict[str, Outcome]:
        """Wait until all batches have ended; return how, by kind."""
        ended = {name: await self.client.until(id_) for name, id_ in self.ids.items()}
        return {
            name: Outcome(
                batch["status"], batch["request_counts"], await self.client.results(batch)
            )
            for name, batch in ended.items()
        }

    async def _batches(self) -> list[dict[str, Any]]:
        return [await self.client.until(id_, 0) for id_ in self.ids.values()]


def check(outcomes: Mapping[str, Outcome], undisturbed: Mapping[str, Outcome]) -> None:
    """Fail unless each line has one result, and that of the undisturbed run."""
    for name, outcome in outcomes.items():
        expected = undisturbed[name]
        assert outcome.status == "completed", name
        for number, result in expected.results.items():
            assert outcome.results.get(number) == result, (name, number)
        assert len(outcome.results) == len(expected.results), name
        assert outcome.counts == expected.counts, name
