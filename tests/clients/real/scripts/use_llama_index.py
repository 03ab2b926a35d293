"""llama-index: OpenAILike, with an agent, a structured model and images."""

import base64
from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from openai import BadRequestError
from pydantic import BaseModel
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run


class Weather(BaseModel):
    """The weather."""

    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20, 30]


def weather(is_rome: bool) -> str:
    """Tell the weather in Rome or Oslo."""
    return f"clear, {is_rome}"


def model(**options: Any) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key="none",
        context_window=1024,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
        **options,
    )


def question(text: str = QUESTION) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def stream() -> None:
    pieces = [piece.delta or "" for piece in model().stream_chat([question()])]
    assert ANSWER in "".join(pieces)


def second_turn() -> None:
    first = model().chat([question()]).message
    assert model().chat([question(), first, question("What does os.getcwd do?")]).message.content


def completion() -> None:
    assert model().complete(QUESTION).text


def text_completion() -> None:
    llm = OpenAILike(
        model=MODEL, api_base=BASE_URL, api_key="none", is_chat_model=False, max_tokens=16
    )
    assert llm.complete("Return the").text


async def tools() -> None:
    agent = FunctionAgent(tools=[weather], llm=model(), streaming=False)
    answer = await agent.run("What is the weather in Rome?")
    assert answer.tool_calls


async def streamed_tools() -> None:
    agent = FunctionAgent(tools=[weather], llm=model())
    answer = await agent.run("What is the weather in Rome?")
    assert answer.tool_calls


def structured_output_by_tools() -> None:
    answer = model().as_structured_llm(Weather).chat([question()])
    assert isinstance(answer.raw, Weather)


def structured_output_by_json_schema() -> None:
    llm = model(should_use_structured_outputs=True)
    assert isinstance(llm.as_structured_llm(Weather).chat([question()]).raw, Weather)


def image() -> None:
    picture = ImageBlock(
        image=base64.b64decode(RED_SQUARE.partition(",")[2]),
        image_mimetype="image/png",
        detail="low",
    )
    asked = ChatMessage(role="user", blocks=[TextBlock(text="What shape is this?"), picture])
    assert model().chat([asked]).message.content


def large_max_tokens() -> None:
    assert ANSWER in (model(max_tokens=4096).chat([question()]).message.content or "")


def too_long() -> None:
    with refused(BadRequestError, "maximum context length"):
        model().chat([question(TOO_LONG)])


run(globals())
