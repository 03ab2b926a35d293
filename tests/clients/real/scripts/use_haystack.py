"""haystack: OpenAIChatGenerator, and an Agent with a tool."""

from typing import Annotated, Any

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from openai import BadRequestError
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run
from weather import Weather


@tool
def weather(is_rome: Annotated[bool, "Whether the city is Rome"]) -> str:
    """Tell the weather in a city."""
    return f"clear, {is_rome}"


def generator(**options: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=BASE_URL,
        api_key=Secret.from_token("none"),
        max_retries=0,
        generation_kwargs={"temperature": 0, **options},
    )


def ask(*messages: ChatMessage, **options: Any) -> str:
    replies = generator(**options).run(list(messages))["replies"]
    return str(replies[0].text)


def stream() -> None:
    chunks: list[StreamingChunk] = []
    generator().run([ChatMessage.from_user(QUESTION)], streaming_callback=chunks.append)
    assert ANSWER in "".join(chunk.content for chunk in chunks)


def second_turn() -> None:
    asked = ChatMessage.from_user(QUESTION)
    first = generator().run([asked])["replies"][0]
    assert ask(asked, first, ChatMessage.from_user("What does os.getcwd do?"))


def tools() -> None:
    agent = Agent(chat_generator=generator(), tools=[weather], max_agent_steps=4)
    told = agent.run(messages=[ChatMessage.from_user("What is the weather in Rome?")])["messages"]
    assert any(message.tool_call_results for message in told)


def structured_output() -> None:
    Weather.model_validate_json(ask(ChatMessage.from_user(QUESTION), response_format=Weather))


def image() -> None:
    picture = ImageContent(
        base64_image=RED_SQUARE.partition(",")[2], mime_type="image/png", detail="low"
    )
    assert ask(ChatMessage.from_user(content_parts=["What shape is this?", picture]))


def large_max_tokens() -> None:
    assert ANSWER in ask(ChatMessage.from_user(QUESTION), max_completion_tokens=4096)


def too_long() -> None:
    with refused(BadRequestError, "maximum context length"):
        ask(ChatMessage.from_user(TOO_LONG))


run(globals())
