"""semantic-kernel: chat completion with the kernel's own loop of function calls."""

from typing import Annotated, Any, Literal

from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, ChatMessageContent, ImageContent, TextContent
from semantic_kernel.exceptions import ServiceException
from semantic_kernel.functions import kernel_function
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run


class Answer(BaseModel):
    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20, 30]


class Weather:
    @kernel_function(description="Tell the weather in a city.")
    def weather(self, is_rome: Annotated[bool, "Whether the city is Rome"]) -> str:
        return f"clear, {is_rome}"

    @kernel_function(description="Write a note.")
    def note(self, text: Annotated[str, "Nothing bounds it, so the model writes on"]) -> str:
        return "written"


def service() -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


def settings(**options: Any) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, **options)


def history(text: str = QUESTION) -> ChatHistory:
    made = ChatHistory()
    made.add_user_message(text)
    return made


def kernel() -> Kernel:
    made = Kernel()
    made.add_plugin(Weather(), "guide")
    return made


def offered(function: str) -> FunctionChoiceBehavior:
    return FunctionChoiceBehavior.Auto(filters={"included_functions": [f"guide-{function}"]})


async def stream() -> None:
    pieces = service().get_streaming_chat_message_content(history(), settings())
    assert ANSWER in "".join([str(piece) async for piece in pieces])


async def second_turn() -> None:
    told = history()
    first = await service().get_chat_message_content(told, settings())
    told.add_message(first)
    told.add_user_message("What does os.getcwd do?")
    assert str(await service().get_chat_message_content(told, settings()))


async def _tools(function: str, **options: Any) -> None:
    told = history("What is the weather in Rome?")
    await service().get_chat_message_content(
        told, settings(function_choice_behavior=offered(function), **options), kernel=kernel()
    )
    assert "tool" in [message.role.value for message in told.messages]


async def tools() -> None:
    await _tools("weather")


async def tool_call_cut_by_max_tokens() -> None:
    await _tools("note", max_tokens=64)


async def streamed_tools() -> None:
    told = history("What is the weather in Rome?")
    pieces = service().get_streaming_chat_message_content(
        told, settings(function_choice_behavior=offered("weather")), kernel=kernel()
    )
    assert [piece async for piece in pieces]
    assert "tool" in [message.role.value for message in told.messages]


async def structured_output() -> None:
    answer = await service().get_chat_message_content(history(), settings(response_format=Answer))
    Answer.model_validate_json(str(answer))


async def image() -> None:
    told = ChatHistory()
    parts: list[Any] = [TextContent(text="What shape is this?"), ImageContent(data_uri=RED_SQUARE)]
    told.add_message(ChatMessageContent(role="user", items=parts))
    assert str(await service().get_chat_message_content(told, settings()))


async def large_max_tokens() -> None:
    answer = await service().get_chat_message_content(history(), settings(max_tokens=4096))
    assert ANSWER in str(answer)


async def too_long() -> None:
    with refused(ServiceException, "maximum context length"):
        await service().get_chat_message_content(history(TOO_LONG), settings())


run(globals())
