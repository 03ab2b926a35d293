"""Conversations stay at the replica that has their earlier turns in memory."""

from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults.served.answer import read
from tests.faults.served.kinds import about
from tests.faults.served.replicas import Replicas
from tests.measured import Record

NUM_CONVERSATIONS = 8
NUM_TURNS = 4


async def test_the_next_turn_goes_where_the_last_one_ran(
    client: httpx.AsyncClient, replicas: Replicas, record: Record
) -> None:
    talks = [Talk(number) for number in range(NUM_CONVERSATIONS)]
    for _ in range(NUM_TURNS):
        for talk in talks:  # one after the other: no replica is too busy
            await talk.take_a_turn(client)
    for talk in talks:
        used = {replicas.runs_of(request_id)[0] for request_id in talk.request_ids}
        assert len(used) == 1, talk.request_ids
    record("replicas used", len({replicas.runs_of(talk.request_ids[0])[0] for talk in talks}))


@dataclass
class Talk:
    """A conversation."""

    number: int
    request_ids: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def take_a_turn(self, client: httpx.AsyncClient) -> None:
        """Ask a question and keep the answer."""
        turn = len(self.request_ids)
        question = f"Conversation {self.number}, question {turn}?"
        self.messages.append({"role": "user", "content": question})
        self.request_ids.append(f"talk-{self.number}-{turn}")
        body = about("", messages=self.messages, max_tokens=5)
        answer = await read(client, body, request_id=self.request_ids[-1])
        assert answer.is_whole, answer.body
        self.messages.append({"role": "assistant", "content": answer.choices[0].text})
