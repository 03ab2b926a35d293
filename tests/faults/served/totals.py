"""The sums over all series of `GET /metrics`, to the last token."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import httpx

from tests.faults.served.kinds import about
from tests.faults.served.replicas import DEADLINE_S
from tests.prometheus import Sample, samples

DELIVERED = "raystream_delivered_tokens_total"
PROMPTS = "raystream_prompt_tokens_total"
MOVED = "raystream_streams_moved_total"
CHAT = "/v1/chat/completions"
FIRST_MARK = 7
"""Tokens; any number will do."""


@dataclass(frozen=True)
class Totals:
    """The sums of one text."""

    found: Sequence[Sample]

    def of(self, name: str, **labels: str) -> float:
        """Return the sum over the series of this name that have these labels."""
        return sum(
            sample.value
            for sample in self.found
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def replicas(self) -> set[str]:
        """Return the replicas of the model that have series."""
        name = "vllm:num_requests_running"
        return {sample.labels["replica"] for sample in self.found if sample.name == name}


@dataclass(frozen=True)
class Mark:
    """Totals that hold all requests so far, and what was asked to be sure of that."""

    totals: Totals  # the sums, those of the questions included
    num_tokens: int  # tokens of the questions' answers
    num_prompt_tokens: int  # tokens of the questions

    def gained(self, before: "Mark", name: str, **labels: str) -> float:
        """Return how much a sum has grown, except by this mark's own questions."""
        own = {DELIVERED: self.num_tokens, PROMPTS: self.num_prompt_tokens}.get(name, 0)
        return self.totals.of(name, **labels) - before.totals.of(name, **labels) - own


async def totals(client: httpx.AsyncClient) -> Totals:
    """Return the sums of a text that may be a moment old."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return Totals(samples(answer.text))


async def mark(client: httpx.AsyncClient) -> Mark:
    """Return the totals of an otherwise idle server.

    A text may lack the latest requests. It lacks none if the next one that differs has gained
    exactly one more answer, of a length that no earlier question had.
    """
    num_tokens = num_prompt_tokens = 0
    async with asyncio.timeout(DEADLINE_S):
        for length in count(FIRST_MARK):
            before = await totals(client)
            answer = await client.post(CHAT, json=about("os.stat", max_tokens=length))
            usage = answer.json()["usage"]
            num_tokens += usage["completion_tokens"]
            num_prompt_tokens += usage["prompt_tokens"]
            after = await _next(client, before)
            if after.of(DELIVERED) - before.of(DELIVERED) == length:
                return Mark(after, num_tokens, num_prompt_tokens)
    raise AssertionError("the lengths never end")


async def _next(client: httpx.AsyncClient, before: Totals) -> Totals:
    """Wait for a text with more tokens."""
    while True:
        found = await totals(client)
        if found.of(DELIVERED) > before.of(DELIVERED):
            return found
        await asyncio.sleep(0.05)  # nothing tells when the next text is made
