"""`anthropic` for Python: messages, whole and streamed, tools, counts and errors.

The embedded model was trained neither for tools nor for JSON. Only the grammar makes those answers
valid, so the tests of them check their form, not their meaning.
"""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock
from pydantic import BaseModel

from models.training.drawings import answer_about, random_drawing
from tests.clients.conftest import Narrow
from tests.clients.questions import ANSWERS, MODEL, NAME, NARROW
from tests.clients.snippet import run_snippet
from tests.engines import only_raystream
from tests.images import data_uri
from tests.serve_app.local_server import LocalServer

WEATHER: Any = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(local: LocalServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=local.url, api_key="none", max_retries=0, http_client=local.client()
    ) as client:
        yield client


def about(name: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What does {name} do?"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 200, **options}
    return {**asked, "extra_body": {"temperature": 0}}


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def call_of(message: Message) -> ToolUseBlock:
    (call,) = (block for block in message.content if isinstance(block, ToolUseBlock))
    assert call.input["city"] in ("Oslo", "Rome")
    return call


def test_a_whole_answer(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**about(NAME))
    assert text_of(message) == ANSWERS[NAME]
    assert (message.role, message.model, message.type) == ("assistant", MODEL, "message")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens > 5
    assert message._request_id


def test_a_streamed_answer_joins_to_the_whole_one(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**about(NAME))
    with claude.messages.stream(**about(NAME)) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(pieces) == text_of(message) == text_of(whole)
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_raw_events_come_in_anthropic_s_order(claude: anthropic.Anthropic) -> None:
    kinds = [event.type for event in claude.messages.create(**about(NAME), stream=True)]
    start, block, *deltas, stop, end, last = kinds
    assert [start, block] == ["message_start", "content_block_start"]
    assert set(deltas) == {"content_block_delta"}
    assert [stop, end, last] == ["content_block_stop", "message_delta", "message_stop"]


async def test_the_asynchronous_client_reads_many_streams_at_once(local: LocalServer) -> None:
    names = list(ANSWERS)[:4]

    async def answer_about(client: anthropic.AsyncAnthropic, name: str) -> str:
        async with client.messages.stream(**about(name)) as stream:
            return "".join([piece async for piece in stream.text_stream])

    async with anthropic.AsyncAnthropic(
        base_url=local.url, api_key="none", http_client=local.async_client()
    ) as client:
        together = await asyncio.gather(*(answer_about(client, name) for name in names))
        alone = [text_of(await client.messages.create(**about(name))) for name in names]
    assert together == alone


def test_a_stop_sequence_ends_the_text_and_is_named(claude: anthropic.Anthropic) -> None:
    stop = ANSWERS[NAME].split()[3]
    asked = about(NAME, stop_sequences=["never there", stop])
    message = claude.messages.create(**asked)
    assert text_of(message) == ANSWERS[NAME].partition(stop)[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)


def test_a_truncated_answer_says_so(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**about(NAME, max_tokens=3))
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_a_second_turn_and_a_system_prompt_are_read(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(**about(NAME))
    turns: list[Any] = [
        *about(NAME)["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "What does os.getcwd do?"},
    ]
    told: Any = {"type": "text", "text": "You explain Python.", "cache_control": None}
    second = claude.messages.create(**about(NAME, messages=turns, system=[told]))
    assert text_of(second)


@only_raystream("images are refused with vLLM")
def test_a_drawing_is_described(claude: anthropic.Anthropic) -> None:
    drawing = random_drawing(Random(7))
    data = data_uri(drawing.render()).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [
        {"type": "image", "source": source},
        {"type": "text", "text": "What is in the picture?"},
    ]
    message = claude.messages.create(**about(NAME, messages=[{"role": "user", "content": content}]))
    assert text_of(message) == answer_about(drawing)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_loop_of_tools(claude: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    single: Any = {**choice, "disable_parallel_tool_use": True}
    asked = about(NAME, tools=[WEATHER])
    first = claude.messages.create(**asked, tool_choice=single)
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call_of(first).id, "content": "clear"}
    asked["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(**asked)
    assert second.stop_reason in ("end_turn", "max_tokens")
    assert text_of(second)


def test_a_turn_may_hold_a_result_and_more_text(claude: anthropic.Anthropic) -> None:
    asked = about(NAME, tools=[WEATHER])
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = claude.messages.create(**asked, tool_choice=choice)
    result = {"type": "tool_result", "tool_use_id": call_of(first).id, "content": "clear"}
    text = {"type": "text", "text": f"What does {NAME} do?"}
    asked["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, text]},
    ]
    assert text_of(claude.messages.create(**asked))
    counted = claude.messages.count_tokens(
        model=asked["model"], messages=asked["messages"], tools=asked["tools"]
    )
    asked["messages"][-1] = {"role": "user", "content": [result]}
    without_text = claude.messages.count_tokens(
        model=asked["model"], messages=asked["messages"], tools=asked["tools"]
    )
    assert counted.input_tokens > without_text.input_tokens


def test_a_streamed_call_is_the_whole_one(claude: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = about(NAME, tools=[WEATHER], tool_choice=choice)
    whole = call_of(claude.messages.create(**asked))
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = call_of(stream.get_final_message())
    assert "input_json" in kinds
    assert (streamed.name, streamed.input) == (whole.name, whole.input)


def test_the_sdk_s_own_loop_of_tools_runs_the_function(claude: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        asked.append(city)
        return "clear"

    runner = claude.beta.messages.tool_runner(
        **about(NAME, tools=[weather]),
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        thread=False,
    )
    reasons = [message.stop_reason for message in runner]
    assert reasons == ["tool_use", "tool_use"]
    assert len(asked) == 2
    assert set(asked) <= {"Oslo", "Rome"}


def test_a_parsed_answer_is_an_instance_of_the_requested_model(claude: anthropic.Anthropic) -> None:
    class Sky(BaseModel):
        colour: Literal["blue", "grey"]
        is_windy: bool

    message = claude.messages.parse(**about(NAME), output_format=Sky)
    assert isinstance(message.parsed_output, Sky)


def test_tokens_are_counted_as_the_answer_counts_them(claude: anthropic.Anthropic) -> None:
    asked = about(NAME, system="You explain Python.", tools=[WEATHER])
    message = claude.messages.create(**{**asked, "max_tokens": 1})
    usage = message.usage
    del asked["max_tokens"], asked["extra_body"]
    counted = claude.messages.count_tokens(**asked)
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    del asked["tools"]
    assert claude.messages.count_tokens(**asked).input_tokens < counted.input_tokens


def test_errors_are_the_sdk_s_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**about(NAME, model="claude"))
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    assert claude.messages.create(
        **about(NAME), thinking={"type": "enabled", "budget_tokens": 1024}
    ).content
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.type"):
        claude.messages.create(**about(NAME), tools=[{"type": "bash_20250124", "name": "bash"}])
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        claude.messages.create(
            **about(NAME, messages=[{"role": "user", "content": "word " * 5000}])
        )


def test_a_client_that_leaves_a_stream_frees_its_slot(
    claude: anthropic.Anthropic, held: Narrow
) -> None:
    with claude.messages.stream(**about(NAME, model=NARROW)) as stream:
        next(iter(stream.text_stream))
        held.wait_until_admitted(1)
    held.wait_until_admitted(0)


def test_the_snippet_of_the_page_runs(
    local: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_snippet("Anthropic's own SDK", local)
    assert ANSWERS[NAME] in capsys.readouterr().out
