"""Log-probabilities of prompts on the wire: vLLM's field, and prompts that are repeated."""

import asyncio
from collections.abc import Iterator
from struct import pack
from typing import Any

import httpx
import openai
import pytest

from deployments.contract.errors import InvalidRequestError
from deployments.contract.output import (
    FinishReason,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
    TokenLogprobs,
)
from deployments.contract.sampling_params import MAX_NUM_PROMPT_LOGPROBS
from serve_app.api.completions.answer import CompletionFramer
from tests.serve_app.apps import Client
from tests.serve_app.fakes import FakeBackend, Step
from tests.serve_app.sse_decoder import stream_events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "m", "prompt": "a é"},
}
both_surfaces = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def part(
    first: tuple[int, bytes] | None, *positions: tuple[tuple[tuple[int, bytes, float], ...], int]
) -> PromptLogprobs:
    """Return positions packed as the engine does: their entries, the own one first, and a rank."""
    entries = [entry for position, _ in positions for entry in position]
    return PromptLogprobs(
        first,
        len(positions[0][0]) - 1 if positions else 2,
        pack(f"<{len(entries)}i", *(token_id for token_id, _, _ in entries)),
        pack(f"<{len(entries)}f", *(logprob for _, _, logprob in entries)),
        pack(f"<{len(positions)}i", *(rank for _, rank in positions)),
        tuple({token_id: (token_id, data) for token_id, data, _ in entries}.values()),
    )


def scored(*parts: PromptLogprobs) -> TextDelta:
    return TextDelta((), "", prompt_logprobs=parts)


A, SPACE, HALF, REST = (5, b"a"), (6, b" "), (7, b"\xc3"), (8, b"\xa9")
PARTS = (
    part(A, (((*SPACE, -4.0), (*HALF, -0.25), (*A, -2.0)), 7)),
    part(
        None,
        (((*HALF, -0.5), (*HALF, -0.5), (*REST, -1.0)), 1),
        (((*REST, -float("inf")), (*SPACE, -0.125), (*A, -3.0)), 300),
    ),
)
GAINED = TokenLogprobs(TokenLogprob(9, b"!", -1.5), (TokenLogprob(5, b"a", -0.5),))
LAST = TextDelta((9,), "!", FinishReason.STOP, logprobs=(GAINED,))
STEPS: list[Step] = [[scored(PARTS[0])], [scored(PARTS[1])], [LAST]]
OTHER: list[Step] = [[LAST]]  # a further answer to the same prompt
EMPTY: list[Step] = [[scored(*PARTS), TextDelta((), "", FinishReason.LENGTH)]]

OWN = [
    {"6": {"logprob": -4.0, "rank": 7, "decoded_token": " "}},
    {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"}},
    {"8": {"logprob": -9999.0, "rank": 300, "decoded_token": "\ufffd"}},
]
TOP = [
    {
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": "\ufffd"},
        "5": {"logprob": -2.0, "rank": 2, "decoded_token": "a"},
    },
    {"8": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"}},
    {
        "6": {"logprob": -0.125, "rank": 1, "decoded_token": " "},
        "5": {"logprob": -3.0, "rank": 2, "decoded_token": "a"},
    },
]
ECHOED: dict[str, list[Any]] = {
    "tokens": ["a", " ", "bytes:\\xc3", "bytes:\\xa9", "!"],
    "token_logprobs": [None, -4.0, -0.5, -9999.0, -1.5],
    "top_logprobs": [
        None,
        {"bytes:\\xc3": -0.25, " ": -4.0},
        {"bytes:\\xc3": -0.5},
        {" ": -0.125, "bytes:\\xa9": -9999.0},
        {"a": -0.5, "!": -1.5},
    ],
    "text_offset": [0, 1, 2, 2, 3],
}


async def positions(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = (await client.post(path, json={**PROMPT[path], **fields})).json()
    return answer if path == CHAT else answer["choices"][0]


@both_surfaces
async def test_each_position_has_the_prompt_s_own_token_and_the_likeliest(
    client: Client, path: str
) -> None:
    client.backend.steps = STEPS
    found = (await positions(client, path, prompt_logprobs=2))["prompt_logprobs"]
    assert found == [None, *({**own, **top} for own, top in zip(OWN, TOP, strict=True))]
    own_first = [next(iter(position)) for position in found[1:]]
    assert own_first == ["6", "7", "8"]
    assert client.backend.requests[0].sampling.prompt_logprobs == 2
    found = (await positions(client, path, prompt_logprobs=0))["prompt_logprobs"]
    assert found == [None, *OWN]
    assert client.backend.requests[1].sampling.prompt_logprobs == 0


@both_surfaces
async def test_an_answer_has_none_that_were_not_asked_for(client: Client, path: str) -> None:
    found = await positions(client, path, prompt_logprobs=None)
    assert "prompt_logprobs" not in found
    assert client.backend.requests[0].sampling.prompt_logprobs is None


async def test_a_prompt_of_one_token_has_one_position(client: Client) -> None:
    client.backend.steps = [[scored(part(A))], [LAST]]
    found = await positions(client, COMPLETIONS, prompt_logprobs=1, echo=True, logprobs=1)
    assert found["prompt_logprobs"] == [None]
    assert found["logprobs"]["token_logprobs"] == [None, -1.5]


async def test_a_repeated_prompt_brings_its_log_probabilities(client: Client) -> None:
    client.backend.steps = STEPS
    choice = await positions(client, COMPLETIONS, echo=True, logprobs=1)
    assert choice["text"] == "a é!"
    assert choice["logprobs"] == ECHOED
    assert "prompt_logprobs" not in choice
    sampling = client.backend.requests[0].sampling
    assert (sampling.top_logprobs, sampling.prompt_logprobs) == (1, 1)


async def test_both_fields_together_get_as_many_of_the_likeliest_as_each_asks_for(
    client: Client,
) -> None:
    client.backend.steps = STEPS
    choice = await positions(client, COMPLETIONS, echo=True, logprobs=1, prompt_logprobs=2)
    assert client.backend.requests[0].sampling.prompt_logprobs == 2
    assert choice["logprobs"] == ECHOED
    assert list(choice["prompt_logprobs"][1]) == ["6", "7", "5"]


async def test_with_max_tokens_0_only_the_prompt_is_returned(client: Client) -> None:
    client.backend.steps = EMPTY
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0}
    answer = await client.post(COMPLETIONS, json={**PROMPT[COMPLETIONS], **fields})
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a é", "length")
    assert choice["logprobs"] == {name: entries[:-1] for name, entries in ECHOED.items()}
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert client.backend.requests[0].sampling.max_tokens == 0


async def test_each_answer_to_a_prompt_repeats_it_but_it_is_computed_once(client: Client) -> None:
    client.backend.scripts = [STEPS, OTHER, EMPTY, OTHER]
    fields = {"prompt": ["a é", "a é"], "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    answer = await client.post(COMPLETIONS, json={**PROMPT[COMPLETIONS], **fields})
    choices = answer.json()["choices"]
    assert [choice["text"] for choice in choices] == ["a é!", "a é!", "a é", "a é!"]
    assert all(choice["prompt_logprobs"] == [None, *OWN] for choice in choices)
    assert [choice["logprobs"] == ECHOED for choice in choices] == [True, True, False, True]
    asked = [request.sampling.prompt_logprobs for request in client.backend.requests]
    assert asked == [1, None, 1, None]


async def test_a_streamed_prompt_comes_with_its_log_probabilities_before_its_answers(
    client: Client,
) -> None:
    client.backend.scripts = [EMPTY, OTHER]
    fields = {"n": 2, "echo": True, "logprobs": 1}
    *chunks, done = await stream_events(client, COMPLETIONS, {**PROMPT[COMPLETIONS], **fields})
    assert done == "[DONE]"
    for index, text in ((0, "a é"), (1, "a é!")):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["text"] for choice in mine[:2]] == ["a é", ""]
        for name, entries in ECHOED.items():
            assert [choice["logprobs"][name] for choice in mine[:2]] == [entries[:2], entries[2:-1]]
        assert "".join(choice["text"] for choice in mine) == text


def test_answers_that_come_before_the_log_probabilities_of_their_prompt_are_held_back() -> None:
    framer = CompletionFramer(["a é"], num_per_prompt=2, num_echoed_logprobs=1)
    assert [framer.opening(index) for index in range(2)] == [None, None]
    assert framer.gain(1, LAST) == []
    chunks = [c for part in PARTS for c in framer.gain(0, scored(part))] + framer.gain(0, LAST)
    assert [(c["index"], c["text"]) for c in chunks] == [
        *((0, "a é"), (1, "a é")),
        *((0, ""), (1, "")),
        *((1, "!"), (0, "!")),
    ]
    offsets = [chunk["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0, 1], [0, 1], [2, 2], [2, 2], [3], [3]]
    assert [c["finish_reason"] for c in chunks] == [*(None,) * 4, "stop", "stop"]


MANY = MAX_NUM_PROMPT_LOGPROBS // 8
"""Tokens of each of two prompts, two of whose log-probabilities at each token just fit twice."""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 0}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_more_log_probabilities_than_one_request_may_have_are_refused_by_the_client_s_name(
    client: Client, fields: dict[str, Any], param: str
) -> None:
    client.backend.steps = STEPS
    asked = {**PROMPT[COMPLETIONS], "prompt": ["a é", "a é"], "n": 2, **fields}
    client.backend.accepted = {"num_prompt_tokens": MANY}
    assert (await client.post(COMPLETIONS, json=asked)).status_code == 200
    client.backend.accepted = {"num_prompt_tokens": MANY + 1}
    error = await client.refused(COMPLETIONS, asked)
    assert error["param"] == param
    assert "131080; one request may have at most 131072" in error["message"]
    assert all(stream.closed.is_set() for stream in client.backend.streams[-4:])


async def test_the_engine_s_refusal_of_a_repeated_prompt_names_the_client_s_field(
    client: Client,
) -> None:
    client.backend.refusal = InvalidRequestError(
        "the prompt is too long to score", "prompt_logprobs"
    )
    error = await client.refused(COMPLETIONS, {**PROMPT[COMPLETIONS], "echo": True, "logprobs": 1})
    assert error["param"] == "logprobs"


async def test_a_prompt_is_written_once_for_all_its_answers(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[PromptLogprobs] = []
    positions_of = PromptLogprobs.positions

    def counted(part: PromptLogprobs) -> Iterator[tuple[TokenLogprobs, int]]:
        written.append(part)
        return positions_of(part)

    monkeypatch.setattr(PromptLogprobs, "positions", counted)
    for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        client.backend.scripts = [STEPS, OTHER, OTHER]
        asked = {**PROMPT[COMPLETIONS], "n": 3, **fields}
        assert (await client.post(COMPLETIONS, json=asked)).status_code == 200
        assert written == list(PARTS)
        written.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_other_requests_go_on_between_the_parts_of_a_prompt(
    client: Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    turns, num_turns = [], 0
    positions_of = PromptLogprobs.positions

    def noted(part: PromptLogprobs) -> Iterator[tuple[TokenLogprobs, int]]:
        turns.append(num_turns)
        return positions_of(part)

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(PromptLogprobs, "positions", noted)
    client.backend.steps = [[scored(PARTS[0], *PARTS[1:] * 5)], [LAST]]
    other = asyncio.create_task(take_turns())
    asked = {**PROMPT[COMPLETIONS], "echo": True, "logprobs": 1, "stream": stream}
    assert (await client.post(COMPLETIONS, json=asked)).status_code == 200
    other.cancel()
    assert len(set(turns)) == 6


async def test_openai_s_client_reads_them(
    openai_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.steps = STEPS
    chat = await openai_client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], extra_body={"prompt_logprobs": 2}
    )
    found = chat.to_dict()["prompt_logprobs"]
    assert isinstance(found, list)
    assert found[0] is None
    assert found[3] == {**OWN[2], **TOP[2]}
    completion = await openai_client.completions.create(
        model="m", prompt="a é", echo=True, logprobs=1, extra_body={"prompt_logprobs": 2}
    )
    assert completion.choices[0].to_dict()["prompt_logprobs"] == found
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.to_dict() == ECHOED
