"""Answers that lose their replica while the prompt's log-probabilities are on their way.

The prompt is computed in chunks, and each chunk's log-probabilities leave at once. The next replica
sends what is missing, so each position arrives exactly once.
"""

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from deployments.generator_replica import GeneratorReplica
from tests.faults.cut_replicas import Cut, Cuts, two_replicas
from tests.faults.test_lost_at_each_token import FOLDER
from tests.serve_app.sse_decoder import events_of

PATH = "/v1/completions"
PROMPT = list(range(300, 360))
ASKED: dict[str, Any] = {
    "model": "m",
    "prompt": PROMPT,
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "echo": True,
    "logprobs": 2,
}
LOGPROB_TOLERANCE = 1e-3
IDS = count()


@pytest.fixture(scope="module")
def replicas(cuts: Cuts) -> Iterator[list[GeneratorReplica]]:
    with two_replicas(
        FOLDER, cuts, max_model_len=128, max_num_seqs=4, max_batched_tokens=8
    ) as made:
        yield made


def assert_the_same(found: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert found["tokens"] == undisturbed["tokens"]
    assert found["text_offset"] == undisturbed["text_offset"]
    for each in ("token_logprobs", "top_logprobs"):
        assert found[each][0] is None
        mine, theirs = found[each][1:], undisturbed[each][1:]
        assert len(mine) == len(theirs) == len(PROMPT) + ASKED["max_tokens"] - 1
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, abs=LOGPROB_TOLERANCE)


@pytest.mark.slow
async def test_each_position_arrives_once_wherever_the_answer_is_cut(
    client: httpx.AsyncClient, cuts: Cuts
) -> None:
    undisturbed = (await client.post(PATH, json=ASKED)).json()["choices"][0]

    async def cut(*after: int) -> dict[str, Any]:
        request_id = f"cut{next(IDS)}"
        cuts.plan(request_id, [Cut(at, is_death=at == after[-1]) for at in after])
        answer = await client.post(
            PATH, json={**ASKED, "prompt_logprobs": 1}, headers={"x-request-id": request_id}
        )
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    num_made = cuts.num_made
    for found in await asyncio.gather(cut(0, 9), cut(1, 30, 61), cut(17, 18, 57), cut(60)):
        assert found["text"] == undisturbed["text"]
        assert len(found["prompt_logprobs"]) == len(PROMPT)
        assert_the_same(found["logprobs"], undisturbed["logprobs"])
    assert cuts.num_made - num_made == 9


@pytest.mark.slow
async def test_a_streamed_prompt_is_repeated_once(client: httpx.AsyncClient, cuts: Cuts) -> None:
    undisturbed = (await client.post(PATH, json=ASKED)).json()["choices"][0]
    request_id = f"cut{next(IDS)}"
    cuts.plan(request_id, [Cut(20, is_death=True), Cut(63, is_death=False)])
    answer = await client.post(
        PATH, json={**ASKED, "stream": True}, headers={"x-request-id": request_id}
    )
    *chunks, done = events_of(answer.content)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == undisturbed["text"]
    written = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {name: [entry for each in written for entry in each[name]] for name in written[0]}
    assert_the_same(joined, undisturbed["logprobs"])
