"""dspy: predictions by its chat and JSON adapters, and a native call."""

from typing import Any, Literal

import dspy
import litellm
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run

# Without this dspy takes the model for one without schemas and tools.
litellm.register_model(
    {
        f"openai/{MODEL}": {
            "litellm_provider": "openai",
            "mode": "chat",
            "supports_function_calling": True,
            "supports_response_schema": True,
        }
    }
)


class Mood(dspy.Signature):
    """Name the mood of a sentence."""

    sentence: str = dspy.InputField()
    mood: Literal["glad", "sad"] = dspy.OutputField()


class Shape(dspy.Signature):
    """Name the shape."""

    picture: dspy.Image = dspy.InputField()
    shape: Literal["circle", "square"] = dspy.OutputField()


def weather(is_rome: bool) -> str:
    """Tell the weather in Rome or Oslo."""
    return f"clear, {is_rome}"


def model(**options: Any) -> dspy.LM:
    return dspy.LM(
        f"openai/{MODEL}",
        api_base=BASE_URL,
        api_key="none",
        temperature=0,
        cache=False,
        num_retries=0,
        engine="litellm",
        **options,
    )


def question() -> None:
    assert ANSWER in model()(QUESTION)[0]


def structured_output() -> None:
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Mood)(sentence="What a fine day!").mood in ("glad", "sad")


def fallback_to_json() -> None:
    """Let the chat adapter fail on the model's answer; dspy then asks for JSON."""
    with dspy.context(lm=model(), adapter=dspy.ChatAdapter()):
        assert dspy.Predict(Mood)(sentence="What a fine day!").mood in ("glad", "sad")


async def stream() -> None:
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        predict = dspy.streamify(dspy.Predict(Mood))
        pieces = [piece async for piece in predict(sentence="What a fine day!")]
    assert isinstance(pieces[-1], dspy.Prediction)


def tools() -> None:
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        signature = dspy.Signature("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
        answer = dspy.Predict(signature)(
            question="What is the weather in Rome?", tools=[dspy.Tool(weather)]
        )
    assert answer.calls.tool_calls


def image() -> None:
    with dspy.context(lm=model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Shape)(picture=dspy.Image(RED_SQUARE)).shape


def large_max_tokens() -> None:
    assert ANSWER in model(max_tokens=4096)(QUESTION)[0]


def too_long() -> None:
    with refused(Exception, "ContextWindowExceededError"):
        model()(TOO_LONG)


run(globals())
