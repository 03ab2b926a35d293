"""smolagents: an agent that calls tools, one that writes code, and their steps."""

from base64 import b64decode
from io import BytesIO
from typing import Any

from openai import BadRequestError
from PIL import Image
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep
from steps import ANSWER, BASE_URL, LONG, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run

WEATHER = "What is the weather in Rome?"


@tool
def weather(is_rome: bool) -> str:
    """Tell the weather in a city.

    Args:
        is_rome: Whether the city is Rome.
    """
    return f"clear, {is_rome}"


def model(name: str = MODEL, **options: Any) -> OpenAIModel:
    return OpenAIModel(
        name,
        api_base=BASE_URL,
        api_key="none",
        client_kwargs={"max_retries": 0},
        retry=False,
        **{"temperature": 0, "max_tokens": 100, **options},
    )


def said(text: str) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def chat() -> None:
    assert ANSWER in str(model()(said(QUESTION)).content)


def stream() -> None:
    assert ANSWER in "".join(
        delta.content or "" for delta in model().generate_stream(said(QUESTION))
    )


def first_step(agent: ToolCallingAgent | CodeAgent, **options: Any) -> ActionStep:
    """Run an agent, whose first step has to be an action without an error of the server."""
    assert agent.run(WEATHER, **options) is not None
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    assert steps[0].model_output_message is not None
    return steps[0]


def tools() -> None:
    step = first_step(ToolCallingAgent([weather], model(), max_steps=2))
    assert step.observations.startswith("clear, ")


def streamed_tools() -> None:
    step = first_step(ToolCallingAgent([weather], model(), max_steps=2, stream_outputs=True))
    assert step.observations.startswith("clear, ")


def planning() -> None:
    agent = ToolCallingAgent([weather], model(LONG), max_steps=2, planning_interval=1)
    first_step(agent)


def second_task() -> None:
    agent = ToolCallingAgent([weather], model(LONG), max_steps=1)
    first_step(agent)
    assert agent.run("And in Oslo?", reset=False) is not None


def code() -> None:
    first_step(CodeAgent([weather], model(LONG), max_steps=2))


def structured_code() -> None:
    agent = CodeAgent([weather], model(LONG), max_steps=2, use_structured_outputs_internally=True)
    first_step(agent)


def image() -> None:
    picture = Image.open(BytesIO(b64decode(RED_SQUARE.partition(",")[2])))
    first_step(ToolCallingAgent([weather], model(), max_steps=1), images=[picture])


def large_max_tokens() -> None:
    assert ANSWER in str(model(max_tokens=4096)(said(QUESTION)).content)


def too_long() -> None:
    with refused(BadRequestError, "context_length_exceeded", "maximum context length"):
        model()(said(TOO_LONG))


run(globals())
