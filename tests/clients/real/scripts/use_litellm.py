"""litellm: `completion` against an OpenAI-compatible server."""

import json
from typing import Any

import litellm
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run
from weather import Weather

SERVER: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": "none",
    "num_retries": 0,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
# Nothing bounds the text, so the embedded model writes until `max_tokens`.
ENDLESS_TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Write a note.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    },
}


def question(content: Any = QUESTION) -> list[Any]:
    return [{"role": "user", "content": content}]


def stream() -> None:
    chunks = litellm.completion(
        **SERVER,
        messages=question(),
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
    )
    whole = litellm.stream_chunk_builder(list(chunks))
    assert ANSWER in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 5


def second_turn() -> None:
    messages = question()
    first = litellm.completion(**SERVER, messages=messages, temperature=0)
    messages += [first.choices[0].message, *question("What does os.getcwd do?")]
    second = litellm.completion(**SERVER, messages=messages, temperature=0)
    assert second.choices[0].message.content


def _tool_loop(tool: Any, **options: Any) -> None:
    messages = question("What is the weather in Oslo?")
    first = litellm.completion(**SERVER, messages=messages, tools=[tool], temperature=0, **options)
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message)
    for call in message.tool_calls:
        result = {"sky": "clear"} if not options else {"error": "the call was cut"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    second = litellm.completion(**SERVER, messages=messages, tools=[tool], temperature=0)
    assert second.choices[0].finish_reason in ("stop", "tool_calls", "length")


def tools() -> None:
    _tool_loop(TOOL)


def tool_call_cut_by_max_tokens() -> None:
    _tool_loop(ENDLESS_TOOL, max_tokens=64)


def structured_output() -> None:
    answer = litellm.completion(
        **SERVER, messages=question(), response_format=Weather, temperature=0
    )
    Weather.model_validate_json(answer.choices[0].message.content)


def image() -> None:
    parts = [
        {"type": "text", "text": "What shape is this?"},
        {"type": "image_url", "image_url": {"url": RED_SQUARE, "detail": "low"}},
    ]
    assert litellm.completion(**SERVER, messages=question(parts)).choices[0].message.content


def large_max_tokens() -> None:
    answer = litellm.completion(**SERVER, messages=question(), max_tokens=4096, temperature=0)
    assert ANSWER in answer.choices[0].message.content


def too_long() -> None:
    with refused(litellm.ContextWindowExceededError):
        litellm.completion(**SERVER, messages=question(TOO_LONG))


def models() -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="openai",
        api_base=BASE_URL,
        api_key="none",
    )
    assert any(name.endswith(MODEL) for name in found), found


run(globals())
