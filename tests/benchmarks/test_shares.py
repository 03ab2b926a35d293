import asyncio
import json

import pytest

from benchmarks.serving.timed_answer import DONE
from benchmarks.shares.cases import compare_texts
from benchmarks.shares.client import REFUSED_PAUSE_S, Answer, Client, run_for
from benchmarks.shares.report import Report, points_of
from tests.stopped_clock import Clock, settle

WORDS = [" one", " two", " three"]


def answer(
    key: str, *tokens: tuple[float, int], sent_s: float = 0, is_whole: bool = True, name: str = "0"
) -> Answer:
    """Return an answer with as many tokens in all by these times."""
    made = Answer(sent_s, 200, key=key, name=name)
    for time_s, num_tokens in tokens:
        message = {
            "choices": [{"delta": {"content": f"{num_tokens} "}}],
            "usage": {"completion_tokens": num_tokens},
        }
        made.lines.append((time_s, b"data: " + json.dumps(message).encode() + b"\n"))
    if is_whole:
        made.ended_s = tokens[-1][0]
        made.lines.append((made.ended_s, DONE))
    return made


def test_tokens_are_counted_when_they_come() -> None:
    found = answer("a", (0.5, 1), (0.9, 1), (1.5, 4), sent_s=0.25)
    assert list(found.tokens()) == [(0.5, 1), (1.5, 3)]
    assert found.ttft_s(9.0) == 0.25
    assert found.text == "1 1 4 "
    assert points_of([found], 0.0) == [(0.0, 0.0), (1.0, 1.0), (2.0, 4.0)]


def test_an_answer_that_was_cut_short_has_tokens_and_no_text() -> None:
    found = answer("a", (0.5, 2), is_whole=False)
    assert list(found.tokens()) == [(0.5, 2)]
    assert found.text is None


def test_a_request_without_a_token_has_waited_until_the_end_of_the_run() -> None:
    assert Answer(2.0, key="a", name="0").ttft_s(9.0) == 7.0
    role = (2.5, b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n')
    assert Answer(2.0, 200, [role], key="a", name="0").ttft_s(9.0) == 7.0
    error = (2.5, b'data: {"error": {"message": "lost"}}\n')
    assert Answer(2.0, 200, [error], 2.5, key="a", name="0").ttft_s(9.0) == float("inf")


def test_what_starves_until_the_end_is_in_the_percentile_and_what_is_refused_is_not() -> None:
    report = Report()
    quick = [answer("a", (0.1, 1)) for _ in range(9)]
    report.add_ttfts(
        "a", [*quick, Answer(0.0, key="a", name="9"), Answer(0.0, 503, key="a", name="10")], 60.0
    )
    assert report.ttfts_ms["a"] == [100.0] * 9 + [60_000.0]
    assert report.rows[0][1] == "100, 60000 ms"
    assert report.rows[1] == ("a: refused", "1", "0")
    assert report.are_met == [True, False]


def test_keys_are_compared_over_the_same_time() -> None:
    client = Client(1, WORDS, "run")
    client.answers = [answer("one", (1, 1), (3, 5)), answer("three", (2, 9), (9, 20))]
    assert client.tokens_by_key(2, 9) == {"one": 4, "three": 9}
    assert client.of("three") == client.answers[1:]


def test_no_other_run_and_no_other_key_has_a_prompt() -> None:
    first, again, other = (Client(1, WORDS, run) for run in ("a", "a", "b"))
    asked = [("chat", "0"), ("chat", "1"), ("batch", "0")]
    prompts = [first.prompt(*each) for each in asked]
    assert prompts == [again.prompt(*each) for each in asked]
    assert len({*prompts, *(other.prompt(*each) for each in asked)}) == 6


class FakeClient(Client):
    """Answers at once, without a server."""

    def __init__(self, status: int = 200, text: str = "same") -> None:
        super().__init__(1, WORDS, "run")
        self._status = status
        self._text = text

    async def ask(self, key: str, name: str, *, num_tokens: int = 1, priority: int = 0) -> Answer:
        del num_tokens, priority
        made = Answer(0.0, self._status, ended_s=0.0, key=key, name=name)
        made.lines = lines_of(self._text)
        self.answers.append(made)
        return made


def lines_of(text: str) -> list[tuple[float, bytes]]:
    message = json.dumps({"choices": [{"delta": {"content": text}}]})
    return [(0.0, f"data: {message}\n".encode()), (0.0, DONE)]


async def test_a_client_waits_after_a_refusal(advance: Clock) -> None:
    client = FakeClient(status=503)
    task = asyncio.create_task(client.ask_for_ever("a", "0"))
    await settle()
    assert [each.name for each in client.answers] == ["0 0"]
    advance(0.9 * REFUSED_PAUSE_S)
    await settle()
    assert len(client.answers) == 1
    advance(0.2 * REFUSED_PAUSE_S)
    await settle()
    assert [each.name for each in client.answers] == ["0 0", "0 1"]
    task.cancel()


def test_texts_are_compared_with_those_of_the_same_prompts_asked_again() -> None:
    disturbed, report = Client(1, WORDS, "run"), Report()
    disturbed.answers = [answer("batch", (1, 1), name=f"0 {number}") for number in range(100)]
    for each in disturbed.answers[:-1]:
        each.lines = lines_of("same")
    disturbed.answers += [
        answer("batch", (1, 1), is_whole=False, name="1 0"),
        answer("chat", (1, 1)),
    ]
    again = FakeClient()
    compare_texts(disturbed, again, report)
    assert sorted(each.name for each in again.answers) == sorted(f"0 {n}" for n in range(100))
    assert report.rows == [("long texts that are the same", "99 of 100", "all")]
    assert report.are_met == [False]
    disturbed.answers[99].lines = lines_of("same")
    compare_texts(disturbed, FakeClient(), report)
    assert report.are_met == [False, True]


def test_no_finished_text_is_no_equality() -> None:
    report = Report()
    compare_texts(Client(1, WORDS, "run"), FakeClient(), report)
    assert report.are_met == [False]


def test_a_run_ends_when_its_time_is_over_or_a_work_fails() -> None:
    async def fail() -> None:
        raise ConnectionRefusedError

    began_s, end_s = run_for(0.05, [asyncio.sleep(3600)])
    assert 0.04 < end_s - began_s < 3600
    with pytest.raises(ConnectionRefusedError):
        run_for(3600, [asyncio.sleep(3600), fail()])


async def test_an_answer_is_kept_when_it_ends_and_when_it_is_cut_short() -> None:
    requests: list[bytes] = []
    have_left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n: waiting\n\ndata: [DONE]\n\n")
        await writer.drain()
        if len(requests) == 2:
            await reader.read()  # until the client has left
            have_left.set()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = Client(server.sockets[0].getsockname()[1], WORDS, "run")
        whole = await client.ask("a", "0")
        task = asyncio.create_task(client.ask("a", "1"))
        async with asyncio.timeout(30):
            while len(client.answers) < 2 or not client.answers[1].lines:  # noqa: ASYNC110 -- sockets
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(have_left.wait(), 30)
    assert [line for _, line in whole.lines] == [b": waiting\n", DONE]
    assert whole.status == 200
    assert whole.ended_s is not None
    cut = client.answers[1]
    assert (cut.status, cut.text, cut.ended_s) == (200, "", None)
    assert b"Authorization: Bearer secret-of-the-key-a\r\n" in requests[0]


def test_a_missed_bar_is_told() -> None:
    report = Report()
    report.add_ttfts("alone", [answer("a", (0.1, 1)), answer("a", (0.2, 1))], 9.0)
    report.add_ttfts("beside", [answer("a", (0.2, 1)), answer("a", (0.29, 1))], 9.0, "alone")
    assert report.are_met == [True] * 5
    report.add_ttfts("late", [answer("a", (0.31, 1))], 9.0, "alone")
    assert report.are_met[-1] is False
    assert report.table().row_count == 8
    report.tokens["case"] = {"one": [(0.0, 0.0), (1.0, 5.0)]}
    assert len(report.figure().axes) == 2
