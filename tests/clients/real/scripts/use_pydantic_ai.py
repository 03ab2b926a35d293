"""pydantic-ai: agents on an OpenAI-compatible chat model."""

import base64
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run


class Weather(BaseModel):
    """The weather."""

    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20, 30]


def agent(**options: Any) -> Agent[Any, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
    return Agent(model, model_settings={"temperature": 0}, **options)


async def stream() -> None:
    async with agent().run_stream(QUESTION) as answer:
        assert ANSWER in await answer.get_output()


async def second_turn() -> None:
    first = await agent().run(QUESTION)
    second = await agent().run("What does os.getcwd do?", message_history=first.all_messages())
    assert second.output


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"clear in {city}"


async def tools() -> None:
    answer = await agent(tools=[weather]).run("What is the weather in Oslo?")
    assert "tool-return" in str(answer.all_messages_json())


async def streamed_tools() -> None:
    async with agent(tools=[weather]).run_stream("What is the weather in Oslo?") as answer:
        await answer.get_output()
        assert "tool-return" in str(answer.all_messages_json())


async def structured_output_by_tools() -> None:
    answer = await agent(output_type=Weather).run(QUESTION)
    assert isinstance(answer.output, Weather)


async def structured_output_by_json_schema() -> None:
    answer = await agent(output_type=NativeOutput(Weather)).run(QUESTION)
    assert isinstance(answer.output, Weather)


async def image() -> None:
    data = base64.b64decode(RED_SQUARE.partition(",")[2])
    answer = await agent().run(["What shape is this?", BinaryContent(data, media_type="image/png")])
    assert answer.output


async def large_max_tokens() -> None:
    answer = await agent().run(QUESTION, model_settings={"max_tokens": 4096})
    assert ANSWER in answer.output


async def too_long() -> None:
    with refused(ModelHTTPError, "status_code: 400", "maximum context length"):
        await agent().run(TOO_LONG)


run(globals())
