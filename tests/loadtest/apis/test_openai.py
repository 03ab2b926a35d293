import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.apis.custom import Custom
from loadtest.apis.openai import OpenAiChat, OpenAiCompletions
from loadtest.apis.text_generation import TextGeneration
from loadtest.client.contract import (
    Api,
    BodySettings,
    Call,
    Delta,
    MalformedAnswerError,
    UnsuitableCallError,
    Usage,
)
from loadtest.client.sse import ServerSentEvent
from tests.offenders import for_each

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "usage", "error", "tool_calls"])
            | st.sampled_from(["function", "completion_tokens", "finish_reason", "text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def chat() -> OpenAiChat:
    return OpenAiChat(BodySettings(), {})


def read(payload: Any) -> Delta:
    return chat().read_event(ServerSentEvent(json.dumps(payload)))


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


@for_each(
    ({"role": "assistant", "content": ""}, ""),
    ({"content": None}, ""),
    ({"content": "hello"}, "hello"),
    ({"reasoning_content": "hm"}, "hm"),
    ({"reasoning": "hm"}, "hm"),
    ({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "f{}"),
)
def test_text_is_everything_the_model_wrote(fields: dict[str, Any], text: str) -> None:
    assert read(delta(**fields)).text == text


def test_an_empty_finish_reason_is_none() -> None:
    assert read({"choices": [{"delta": {}, "finish_reason": ""}]}).finish_reason is None
    assert read({"choices": [{"delta": {}, "finish_reason": "stop"}]}).finish_reason == "stop"


def test_the_usage_chunk_is_not_content() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    assert read({"choices": [], "usage": usage | details}) == Delta(usage=Usage(3, 2, 5))


@pytest.mark.parametrize(
    ("error", "said"), [({"message": "too\nmuch"}, "too much"), ("busy", "busy"), ({"x": 1}, "x")]
)
def test_an_error_payload_of_any_shape_is_an_error(error: Any, said: str) -> None:
    told = read({"error": error}).error
    assert told is not None
    assert said in told


@pytest.mark.parametrize(
    ("data", "said"),
    [("overloaded", "overloaded"), ('{"error": {"message": "full"}}', "full"), ("", "without")],
)
def test_an_event_named_error_is_an_error_whatever_its_data(data: str, said: str) -> None:
    told = chat().read_event(ServerSentEvent(data, "error"))
    assert told.error is not None
    assert said in told.error


@for_each("{", "[]", "1", '"x"', '{"choices": 1}', "ping", "[DONE")
def test_an_event_that_is_not_a_chunk_is_malformed(data: str) -> None:
    with pytest.raises(MalformedAnswerError):
        chat().read_event(ServerSentEvent(data))


ODD: list[tuple[str, str, Delta]] = [
    ("message", "{}", Delta(oddity="a chunk without choices")),
    ("message", '{"choices": null}', Delta(oddity="a chunk without choices")),
    (
        "message",
        '{"usage": {"completion_tokens": 5}}',
        Delta(usage=Usage(None, None, 5), oddity="a chunk without choices"),
    ),
    ("message", '{"type": "ping"}', Delta(oddity="a chunk without choices")),
    ("ping", '{"type": "ping"}', Delta(oddity="an event named ping")),
    ("ping", "", Delta(oddity="an event named ping")),
    ("ping", "2026-01-01T00:00:00", Delta(oddity="an event named ping")),
    ("message", ": ping", Delta(oddity="a comment as data")),
    ("message", " : still working", Delta(oddity="a comment as data")),
    ("message", "", Delta(oddity="an event with empty data")),
    ("message", "\n ", Delta(oddity="an event with empty data")),
    ("message", "[DONE] ", Delta(is_done=True)),
    ("done", "[DONE]", Delta(is_done=True)),
    ("chunk", '{"choices": [{"text": "x", "delta": {"content": "x"}}]}', Delta(text="x")),
]


@pytest.mark.parametrize("api", [chat(), OpenAiCompletions(BodySettings(), {})])
@for_each(*ODD)
def test_what_the_sdks_read_past_is_noted_and_no_error(
    name: str, data: str, meaning: Delta, api: Api
) -> None:
    assert api.read_event(ServerSentEvent(data, name)) == meaning


def test_other_apis_read_past_the_same() -> None:
    counting = TextGeneration(BodySettings(), {})
    for name, data, meaning in ODD[4:13]:
        assert counting.read_event(ServerSentEvent(data, name)) == meaning
    no_text = counting.read_event(ServerSentEvent('{"usage": {}}'))
    assert no_text == Delta(oddity="an event without text")
    with_path, plain = Custom({}, "text", ""), Custom({}, None, "")
    for api in (with_path, plain):
        assert api.read_event(ServerSentEvent("{}", "ping")) == Delta(oddity="an event named ping")
    comment = ServerSentEvent(": ping")
    assert with_path.read_event(comment) == Delta(oddity="a comment as data")
    assert plain.read_event(comment) == Delta(text=": ping")


@given(JSON)
def test_any_json_is_parsed_or_malformed(payload: Any) -> None:
    with suppress(MalformedAnswerError):
        found = read(payload)
        assert isinstance(found.text, str)
        assert found.usage is None or (found.usage.output_tokens or 0) >= 0


def test_a_body_asks_for_usage_and_is_overridden_by_extra_fields() -> None:
    api = OpenAiChat(BodySettings("m", 5, 0.0), {"ignore_eos": True, "temperature": 1})
    assert api.body(Call("why?", user="u")) == {
        "messages": [{"role": "user", "content": "why?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "model": "m",
        "max_tokens": 5,
        "temperature": 1,
        "user": "u",
        "ignore_eos": True,
    }


def test_an_image_is_added_to_the_last_message() -> None:
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "what?"})
    body = chat().body(Call("what?", messages, image_url="data:x"))
    assert body["messages"] == [
        messages[0],
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?"},
                {"type": "image_url", "image_url": {"url": "data:x"}},
            ],
        },
    ]


def test_completions_accept_neither_images_nor_conversations() -> None:
    api = OpenAiCompletions(BodySettings(), {})
    with pytest.raises(UnsuitableCallError, match="accepts no images"):
        api.body(Call("what?", image_url="data:x"))
    with pytest.raises(UnsuitableCallError, match="no conversation"):
        api.body(Call("what?", ({}, {"content": "what?"})))
