"""crewai: a model's own calls, and a crew of one agent with a tool."""

from typing import Any, Literal

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel
from steps import ANSWER, BASE_URL, MODEL, QUESTION, TOO_LONG, refused, run


class Weather(BaseModel):
    """The weather."""

    sky: Literal["clear", "cloudy"]
    degrees: Literal[10, 20, 30]


cities: list[str] = []


@tool
def weather(is_rome: bool) -> str:
    """Tell the weather in Rome or Oslo."""
    cities.append("Rome" if is_rome else "Oslo")
    return f"clear, {is_rome}"


def model(**options: Any) -> Any:
    return LLM(
        model=MODEL, provider="openai", base_url=BASE_URL, api_key="none", temperature=0, **options
    )


def crew(**options: Any) -> Any:
    agent = Agent(
        role="guide",
        goal="Explain Python",
        backstory="You know the library.",
        llm=model(),
        tools=options.pop("tools", []),
        max_iter=3,
        max_retry_limit=0,
    )
    task = Task(description=QUESTION, expected_output="A sentence.", agent=agent, **options)
    return Crew(agents=[agent], tasks=[task], verbose=False, tracing=False)


def question() -> None:
    assert ANSWER in model().call(QUESTION)


def stream() -> None:
    assert ANSWER in model(stream=True).call(QUESTION)


def agent() -> None:
    assert crew().kickoff().raw


def tools() -> None:
    assert crew(tools=[weather]).kickoff().raw
    assert cities


def structured_output() -> None:
    answer = model(response_format=Weather).call(QUESTION)
    assert isinstance(answer, Weather) or Weather.model_validate_json(answer)


def structured_task() -> None:
    assert isinstance(crew(output_pydantic=Weather).kickoff().pydantic, Weather)


def large_max_tokens() -> None:
    assert ANSWER in model(max_tokens=4096).call(QUESTION)


def too_long() -> None:
    with refused(Exception, "context"):
        model().call(TOO_LONG)


run(globals())
