"""`openai` for Python: structured answers and calls of tools.

The embedded model was trained for neither. Only the grammar makes its answers valid, so these tests
check the form of answers, not their meaning.
"""

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel, Field

from tests.clients.questions import NAME, about


class Weather(BaseModel):
    """Tell the weather."""

    sky: Literal["clear", "cloudy"]
    degrees: int = Field(ge=-99, le=99)
    is_windy: bool


WEATHER: Any = openai.pydantic_function_tool(Weather, name="weather")
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


def arguments_of(call: Any) -> Any:
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    return json.loads(call.function.arguments)


def test_a_parsed_answer_is_an_instance_of_the_requested_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**about(NAME), response_format=Weather)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Weather)
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_answer_parses_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**about(NAME), response_format=Weather) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_answers_are_valid_at_any_temperature_and_for_each_of_n(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        **about(NAME, temperature=2, seed=3), n=4, response_format=Weather
    )
    parsed = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(weather, Weather) for weather in parsed)
    assert len({str(weather) for weather in parsed}) > 1


def test_json_object_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **about(NAME, max_tokens=512), response_format={"type": "json_object"}
    )
    choice = answer.choices[0]
    # An unbounded object may be longer than the answer, which then holds only its beginning.
    assert (choice.message.content or "").lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


def test_a_schema_that_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    wanted: Any = {"name": "wrong", "schema": schema, "strict": True}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **about(NAME), response_format={"type": "json_schema", "json_schema": wanted}
        )
    assert (caught.value.param or "").startswith("response_format")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}]
)
def test_a_required_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        **about(NAME), tools=[WEATHER, CLOCK], tool_choice=choice
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    for call in message.tool_calls:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert call.id
        if call.function.name == "clock":
            assert arguments_of(call)["zone"] in ("UTC", "CET")
        else:
            assert choice == "required"
            Weather.model_validate(arguments_of(call))


def test_streamed_calls_join_to_the_whole_ones(client: openai.OpenAI) -> None:
    asked = about(NAME, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert whole
    assert streamed
    assert [arguments_of(call) for call in whole] == [
        json.loads(call.function.arguments) for call in streamed
    ]


def test_with_tool_choice_none_no_tool_is_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**about(NAME), tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_a_tool_s_result_is_accepted(client: openai.OpenAI) -> None:
    asked = about(NAME, tools=[WEATHER])
    first = client.chat.completions.create(**asked, tool_choice="required")
    message = first.choices[0].message
    assert message.tool_calls
    told: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "clear"} for call in message.tool_calls
    ]
    asked["messages"] = [*asked["messages"], message.model_dump(exclude_none=True), *told]
    second = client.chat.completions.create(**asked)
    assert second.choices[0].finish_reason in ("stop", "tool_calls")
