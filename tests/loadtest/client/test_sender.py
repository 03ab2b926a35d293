import asyncio
import time

import pytest
from yarl import URL

from loadtest.apis.classify import Classify
from loadtest.apis.custom import Custom
from loadtest.apis.openai import OpenAiCompletions
from loadtest.apis.text_generation import TextGeneration
from loadtest.client.attempt import Task
from loadtest.client.contract import BodySettings, Call, shortened
from loadtest.client.sender import Sender, Target
from loadtest.client.stamped_http import stamped_session
from loadtest.client.watchdog import TimeLimits
from loadtest.mock.script import Behaviour, Fault, Framing
from loadtest.results.record import ErrorKind, TokenSource
from tests.loadtest.mocked import CHAT, Noting, aimed, chat_api, until

ODDITIES = (
    "an event named ping",
    "a comment as data",
    "an event with empty data",
    "a chunk without choices",
)
LIMITS_FOR = {
    Fault.TIMEOUT_FIRST: TimeLimits(total_s=60, first_token_s=0.05, stall_s=0.01),
    Fault.TIMEOUT_STALL: TimeLimits(total_s=60, first_token_s=60, stall_s=0.05),
    Fault.TIMEOUT_TOTAL: TimeLimits(total_s=0.1, first_token_s=60, stall_s=60),
}
KIND_OF_FAULT = {
    Fault.CONNECT: ErrorKind.CONNECT,
    Fault.HTTP_4XX: ErrorKind.HTTP_4XX,
    Fault.HTTP_429: ErrorKind.HTTP_429,
    Fault.HTTP_5XX: ErrorKind.HTTP_5XX,
    Fault.TIMEOUT_FIRST: ErrorKind.TIMEOUT_FIRST,
    Fault.TIMEOUT_STALL: ErrorKind.TIMEOUT_STALL,
    Fault.TIMEOUT_TOTAL: ErrorKind.TIMEOUT_TOTAL,
    Fault.SSE_ERROR: ErrorKind.SSE_ERROR,
    Fault.MALFORMED: ErrorKind.MALFORMED,
    Fault.WRONG_TYPE: ErrorKind.MALFORMED,
    Fault.WRONG_FRAMING: ErrorKind.MALFORMED,
    Fault.NO_HTTP: ErrorKind.MALFORMED,
    Fault.TRUNCATED: ErrorKind.TRUNCATED,
    Fault.RESET: ErrorKind.TRUNCATED,
    Fault.EMPTY: ErrorKind.EMPTY,
}
EARLY = {Fault.CONNECT, Fault.HTTP_4XX, Fault.HTTP_429, Fault.HTTP_5XX, Fault.WRONG_TYPE} | {
    Fault.NO_HTTP,
    Fault.EMPTY,
    Fault.TIMEOUT_FIRST,
}


@pytest.mark.parametrize("fault", list(Fault))
async def test_every_fault_has_one_kind_of_error_and_is_not_retried(fault: Fault) -> None:
    num_before = 0 if fault in EARLY else 3
    behaviour = Behaviour(fault=fault, fault_after=num_before, gap_ms=1)
    async with aimed(behaviour, limits=LIMITS_FOR.get(fault)) as aim:
        record = await aim.send()
    assert record.error is KIND_OF_FAULT[fault]
    assert record.error_message
    assert "\n" not in record.error_message
    assert len(aim.server.bodies) == 1
    # A pause of the machine may reach these limits sooner, and aiohttp drops a response whose
    # headers arrive in one read with the wrong framing.
    if fault not in {Fault.TIMEOUT_STALL, Fault.TIMEOUT_TOTAL, Fault.WRONG_FRAMING}:
        assert len(record.content_s) == num_before
    assert aim.observer.seen == ["started", f"ended {record.error}"]


def test_every_kind_of_error_but_cancelled_has_a_fault() -> None:
    assert set(KIND_OF_FAULT) == set(Fault)
    assert set(KIND_OF_FAULT.values()) == set(ErrorKind) - {ErrorKind.CANCELLED}


async def test_a_closed_port_is_a_connect_error() -> None:
    async with aimed() as aim:
        pass
    async with stamped_session(time.monotonic) as session:
        target = Target(URL(f"http://127.0.0.1:{aim.port}{CHAT}"))
        sender = Sender(session, target, chat_api(), TimeLimits(), time.monotonic, Noting())
        record = await sender.send(Task(0, 0, 0, Call("x")))
    assert record.error is ErrorKind.CONNECT
    assert record.http_status is None
    assert record.headers_s is None


@pytest.mark.parametrize("framing", list(Framing))
async def test_an_answer_is_read_completely_in_every_framing(framing: Framing) -> None:
    async with aimed(Behaviour(framing=framing, num_events=5, tokens_per_event=2)) as aim:
        record = await aim.send()
    assert record.error is None
    assert record.content_tokens == (1, 2, 2, 2, 3)
    assert record.output_tokens == 10
    assert record.token_source is TokenSource.USAGE
    assert record.content_chars == (10,) * 5
    assert record.finish_reason == "length"
    assert record.prompt_tokens == 8
    assert record.oddities == (ODDITIES if framing is Framing.ODD else ())


async def test_times_are_in_order_and_as_far_apart_as_the_delays() -> None:
    behaviour = Behaviour(headers_ms=20, first_token_ms=60, gap_ms=30, tail_ms=30, num_events=3)
    async with aimed(behaviour) as aim:
        record = await aim.send()
    assert record.headers_s is not None
    times = [record.sent_s, record.headers_s, *record.content_s, record.ended_s]
    assert times == sorted(times)
    # On a busy machine a late event can shorten the next gap, but never the sum of the delays.
    assert record.headers_s - record.sent_s > 0.018
    assert record.ended_s - record.sent_s > 0.145
    assert aim.observer.ttfts_ms == [(record.content_s[0] - record.sent_s) * 1000]
    assert aim.observer.num_tokens == 3


async def test_usage_with_each_event_gives_the_event_s_tokens() -> None:
    behaviour = Behaviour(num_events=3, tokens_per_event=4, tells_usage_so_far=True)
    async with aimed(behaviour) as aim:
        record = await aim.send()
    assert record.content_tokens == (4, 4, 4)


async def test_without_usage_chunks_are_counted() -> None:
    async with aimed(Behaviour(num_events=3, tells_usage=False)) as aim:
        record = await aim.send()
    assert record.content_tokens == (1, 1, 1)
    assert record.token_source is TokenSource.CHUNKS


async def test_completions_are_parsed() -> None:
    api = OpenAiCompletions(BodySettings(model="m", max_tokens=3), {"ignore_eos": True})
    async with aimed(Behaviour(num_events=3), path="/v1/completions", api=api) as aim:
        record = await aim.send()
    assert record.error is None
    assert record.output_tokens == 3
    assert aim.server.bodies == [
        {
            "prompt": "What is a list?",
            "model": "m",
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


async def test_text_generation_counts_the_tokens_of_each_event() -> None:
    api = TextGeneration(BodySettings(), {})
    behaviour = Behaviour(num_events=3, tokens_per_event=2)
    async with aimed(behaviour, path="/text-generation", api=api) as aim:
        record = await aim.send(call=Call("hello", user="user-7"))
    assert record.error is None
    assert record.content_tokens == (2, 2, 2)
    assert record.token_source is TokenSource.EVENTS
    assert aim.server.bodies == [
        {"messages": [{"role": "user", "content": "hello"}], "stream": True, "user_id": "user-7"}
    ]


async def test_text_generation_without_done_is_truncated() -> None:
    api = TextGeneration(BodySettings(), {})
    behaviour = Behaviour(fault=Fault.TRUNCATED, fault_after=2)
    async with aimed(behaviour, path="/text-generation", api=api) as aim:
        record = await aim.send()
    assert record.error is ErrorKind.TRUNCATED
    assert record.content_tokens == (1, 1)


async def test_a_classification_is_one_content_event() -> None:
    api = Classify(BodySettings(model="m"), {})
    async with aimed(Behaviour(first_token_ms=10), path="/v1/classify", api=api) as aim:
        record = await aim.send()
    assert record.error is None
    assert len(record.content_s) == 1
    assert record.content_s[0] == record.ended_s
    assert record.token_source is TokenSource.CHUNKS
    assert aim.server.bodies == [{"input": "What is a list?", "model": "m"}]


async def test_a_custom_body_and_path_work_with_any_server() -> None:
    template = {"messages": "{messages}", "who": "{user}", "deep": [{"q": "Q: {text} {x}"}], "n": 1}
    api = Custom(template, "choices[0].delta.content", "[DONE]")
    async with aimed(Behaviour(num_events=3), api=api) as aim:
        record = await aim.send(call=Call("why?", user="u1"))
    assert record.error is None
    assert len(record.content_s) == 3
    assert aim.server.bodies == [
        {
            "messages": [{"role": "user", "content": "why?"}],
            "who": "u1",
            "deep": [{"q": "Q: why? {x}"}],
            "n": 1,
        }
    ]


async def test_a_custom_answer_in_one_piece_is_complete() -> None:
    api = Custom({"input": "{text}"}, "data[0].label", "[DONE]")
    async with aimed(path="/v1/classify", api=api) as aim:
        record = await aim.send()
    assert record.error is None
    assert record.content_chars == (4,)


async def test_a_custom_stream_without_its_last_event_is_truncated_unless_closing_ends_it() -> None:
    behaviour = Behaviour(fault=Fault.TRUNCATED, fault_after=2)
    for done, error in (("[DONE]", ErrorKind.TRUNCATED), ("", None)):
        async with aimed(behaviour, api=Custom({}, "choices[0].delta.content", done)) as aim:
            record = await aim.send()
        assert record.error is error


async def test_a_cancelled_send_returns_the_record() -> None:
    behaviour = Behaviour(fault=Fault.TIMEOUT_STALL, fault_after=2)
    async with aimed(behaviour) as aim:
        sending = asyncio.ensure_future(aim.send())
        await until(lambda: aim.observer.num_tokens == 2)
        sending.cancel()
        record = await sending
    assert record.error is ErrorKind.CANCELLED
    assert len(record.content_s) == 2


async def test_secrets_that_a_server_repeats_are_hidden() -> None:
    async with aimed(Behaviour(fault=Fault.HTTP_5XX), secrets=("the mock",)) as aim:
        record = await aim.send()
    assert record.error_message is not None
    assert "the mock" not in record.error_message
    assert "*** answers 503" in record.error_message


def test_a_secret_that_is_cut_off_is_hidden_too() -> None:
    target = Target(URL("http://h"), secrets=("Bearer sk-secret", "sk-secret"))
    assert target.without_secrets(shortened("no: Bearer sk-secret", 16)) == "no: ***..."
    assert target.without_secrets(shortened("no: sk-secret", 10)) == "no: ***..."
    assert target.without_secrets("no such thing...") == "no such thing..."


async def test_an_answer_of_the_wrong_type_is_quoted() -> None:
    api = Classify(BodySettings(), {})
    async with aimed(Behaviour(fault=Fault.WRONG_TYPE), api=api) as aim:
        record = await aim.send()
    assert record.error is ErrorKind.MALFORMED
    assert record.error_message is not None
    assert record.error_message.endswith("<html>no stream</html>")


async def test_a_configured_header_replaces_ours_in_any_case() -> None:
    given = {"accept": "text/plain", "content-type": "application/json; charset=utf-8"}
    async with aimed(headers=given) as aim:
        await aim.send()
    [sent] = aim.server.headers
    assert sent["Accept"] == "text/plain"
    assert sent["Content-Type"] == "application/json; charset=utf-8"


async def test_a_connection_is_reused() -> None:
    async with aimed(Behaviour(num_events=2)) as aim:
        records = [await aim.send(index) for index in range(3)]
    assert [record.error for record in records] == [None] * 3
    assert [len(record.content_s) for record in records] == [2] * 3
