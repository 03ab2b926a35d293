"""mirascope: its calls by chats, by responses and by Anthropic's messages, and its thinking."""

from base64 import b64decode
from typing import Any, Literal
from urllib.parse import urljoin

from mirascope import llm
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run
from weather import Weather

llm.register_provider("openai", base_url=BASE_URL, api_key="none")
llm.register_provider("anthropic", base_url=urljoin(BASE_URL, "/"), api_key="none")

CHAT, RESPONSES, MESSAGES = f"openai/{MODEL}:completions", f"openai/{MODEL}", f"anthropic/{MODEL}"
THINKING: dict[str, Any] = {"thinking": {"level": "medium", "include_thoughts": True}}


@llm.tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Tell the weather in a city."""
    return f"clear in {city}"


def model(name: str, **options: Any) -> llm.Model:
    return llm.Model(name, **{"temperature": 0, "max_tokens": 200, **options})


def stream() -> None:
    answer = model(CHAT).stream(QUESTION)
    assert ANSWER in "".join(answer.text_stream())


def second_turn() -> None:
    assert model(CHAT).call(QUESTION).resume("And os.getcwd?").text()


def use_weather(name: str, **options: Any) -> None:
    """Ask for a call, run it, and let the model go on."""
    asked = model(name, **options).call("What is the weather in Oslo?", tools=[weather])
    outputs = asked.execute_tools()
    assert "clear in " in str(outputs[0].result)
    asked.resume(outputs).text()


def tools() -> None:
    use_weather(CHAT)


def streamed_tools() -> None:
    answer = model(CHAT).stream("What is the weather in Oslo?", tools=[weather])
    answer.finish()
    assert answer.resume(answer.execute_tools()).text() is not None


def structured_output() -> None:
    assert isinstance(model(CHAT).call(QUESTION, format=Weather).parse(), Weather)


def image() -> None:
    picture = llm.Image.from_bytes(b64decode(RED_SQUARE.partition(",")[2]))
    assert model(CHAT).call(["What shape is this?", picture]).text()


def thinking_by_responses() -> None:
    asked = model(RESPONSES, **THINKING).call(QUESTION)
    assert ANSWER in asked.text()
    assert asked.resume("And os.getcwd?").text()


def thinking_by_messages() -> None:
    asked = model(MESSAGES, **THINKING).call(QUESTION)
    assert ANSWER in asked.text()
    assert asked.resume("And os.getcwd?").text()
    streamed = model(MESSAGES, **THINKING).stream(QUESTION)
    assert ANSWER in "".join(streamed.text_stream())


def tools_by_responses() -> None:
    use_weather(RESPONSES, **THINKING)


def tools_by_messages() -> None:
    use_weather(MESSAGES, **THINKING)


def schema_by_responses() -> None:
    assert isinstance(model(RESPONSES).call(QUESTION, format=Weather).parse(), Weather)
    # A tool for the answer beside the weather's: `tool_choice` is of the type `allowed_tools`.
    chosen = llm.format(Weather, mode="tool")
    answer = model(RESPONSES).call(QUESTION, tools=[weather], format=chosen)
    assert answer.tool_calls or isinstance(answer.parse(), Weather)


def schema_by_messages() -> None:
    assert isinstance(model(MESSAGES).call(QUESTION, format=Weather).parse(), Weather)
    chosen = llm.format(Weather, mode="tool")
    assert isinstance(model(MESSAGES).call(QUESTION, format=chosen).parse(), Weather)


def large_max_tokens() -> None:
    for name in (CHAT, RESPONSES, MESSAGES):
        assert ANSWER in model(name, max_tokens=4096).call(QUESTION).text()


def too_long() -> None:
    with refused(llm.BadRequestError, "maximum context length"):
        model(CHAT).call(TOO_LONG)


run(globals())
