"""openai-agents: agents on an OpenAI-compatible chat model."""

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run
from weather import Weather

set_tracing_disabled(True)


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"clear in {city}"


def agent(max_tokens: int | None = None, **options: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    return Agent(
        name="guide",
        instructions="You explain Python.",
        model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=max_tokens),
        **options,
    )


async def stream() -> None:
    answer = Runner.run_streamed(agent(), QUESTION)
    kinds = [event.type async for event in answer.stream_events()]
    assert "raw_response_event" in kinds
    assert ANSWER in answer.final_output


async def second_turn() -> None:
    first = await Runner.run(agent(), QUESTION)
    told: list[Any] = [*first.to_input_list(), {"role": "user", "content": "And os.getcwd?"}]
    assert (await Runner.run(agent(), told)).final_output


async def tools() -> None:
    answer = await Runner.run(agent(tools=[weather]), "What is the weather in Oslo?")
    assert "tool_call_output_item" in [item.type for item in answer.new_items]


async def streamed_tools() -> None:
    answer = Runner.run_streamed(agent(tools=[weather]), "What is the weather in Oslo?")
    assert "run_item_stream_event" in [event.type async for event in answer.stream_events()]


def responding(**options: Any) -> Agent[Any]:
    """Return an agent that asks `/v1/responses`."""
    asking = agent(**options)
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    asking.model = OpenAIResponsesModel(model=MODEL, openai_client=client)
    return asking


async def responses() -> None:
    assert ANSWER in (await Runner.run(responding(), QUESTION)).final_output
    streamed = Runner.run_streamed(responding(), QUESTION)
    assert "raw_response_event" in [event.type async for event in streamed.stream_events()]
    assert ANSWER in streamed.final_output


async def responses_tools() -> None:
    asking = responding(tools=[weather])
    asking.model_settings.tool_choice = "required"
    answer = await Runner.run(asking, "What is the weather in Oslo?")
    assert "tool_call_output_item" in [item.type for item in answer.new_items]
    assert answer.final_output


async def responses_output_type() -> None:
    answer = await Runner.run(responding(output_type=Weather), QUESTION)
    assert isinstance(answer.final_output, Weather)


async def handoff() -> None:
    other = agent()
    other.name = "other"
    answer = await Runner.run(agent(handoffs=[other]), QUESTION)
    assert answer.last_agent is other


async def structured_output() -> None:
    answer = await Runner.run(agent(output_type=Weather), QUESTION)
    assert isinstance(answer.final_output, Weather)


async def image() -> None:
    parts = [
        {"type": "input_text", "text": "What shape is this?"},
        {"type": "input_image", "image_url": RED_SQUARE, "detail": "low"},
    ]
    asked: list[Any] = [{"role": "user", "content": parts}]
    assert (await Runner.run(agent(), asked)).final_output


async def large_max_tokens() -> None:
    assert ANSWER in (await Runner.run(agent(max_tokens=4096), QUESTION)).final_output


async def too_long() -> None:
    with refused(BadRequestError, "context_length_exceeded", "maximum context length"):
        await Runner.run(agent(), TOO_LONG)


run(globals())
