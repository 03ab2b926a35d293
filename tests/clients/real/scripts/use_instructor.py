"""instructor: objects of pydantic models, by tools and by JSON schema."""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
from instructor.processing.multimodal import Image
from openai import OpenAI
from pydantic import BaseModel, Field
from steps import BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run


class Weather(BaseModel):
    """The weather."""

    sky: Literal["clear", "cloudy"]
    degrees: int = Field(ge=-9, le=9)


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(
        OpenAI(base_url=BASE_URL, api_key="none", max_retries=0), mode=mode
    )


def ask(mode: instructor.Mode, content: Any = QUESTION, **options: Any) -> Weather:
    answer: Weather = client(mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        response_model=Weather,
        max_retries=0,
        temperature=0,
        **options,
    )
    assert isinstance(answer, Weather)
    return answer


def structured_output_by_tools() -> None:
    ask(instructor.Mode.TOOLS)


def structured_output_by_strict_tools() -> None:
    ask(instructor.Mode.TOOLS_STRICT)


def structured_output_by_json_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA)


def large_max_tokens() -> None:
    ask(instructor.Mode.TOOLS, max_tokens=4096)


def stream() -> None:
    partial = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Weather,
        temperature=0,
    )
    assert list(partial)[-1].sky in ("clear", "cloudy")


def several_objects() -> None:
    answers = client(instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Iterable[Weather],
        temperature=0,
    )
    assert all(isinstance(answer, Weather) for answer in answers)


def reask() -> None:
    """Let validation fail once, so that instructor sends the failed call back."""
    attempts = []

    class Doubtful(Weather):
        def model_post_init(self, context: Any) -> None:
            attempts.append(self)
            if len(attempts) == 1:
                raise ValueError("look again")

    client(instructor.Mode.TOOLS).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Doubtful,
        max_retries=2,
        temperature=0,
    )
    assert len(attempts) == 2


def image() -> None:
    ask(instructor.Mode.TOOLS, ["What shape is this?", Image.from_base64(RED_SQUARE)])


def too_long() -> None:
    with refused(Exception, "maximum context length"):  # instructor wraps the SDK's error
        ask(instructor.Mode.TOOLS, TOO_LONG)


def models() -> None:
    listed = OpenAI(base_url=BASE_URL, api_key="none").models.list()
    assert MODEL in [model.id for model in listed]


run(globals())
