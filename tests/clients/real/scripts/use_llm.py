"""llm: its command line and its Python API, with an OpenAI-compatible model in its folder."""

import subprocess
import sys
from pathlib import Path

import llm
from steps import ANSWER, BASE_URL, MODEL, QUESTION, RED_SQUARE, TOO_LONG, refused, run
from weather import Weather

(llm.user_dir() / "extra-openai-models.yaml").write_text(f"""\
- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {BASE_URL}
  supports_schema: true
  supports_tools: true
  vision: true
""")


def weather(is_rome: bool) -> str:
    """Tell the weather in Rome or Oslo."""
    return f"clear, {is_rome}"


def command(*arguments: str) -> str:
    done = subprocess.run(
        [Path(sys.executable).parent / "llm", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stream() -> None:
    assert ANSWER in command("-m", MODEL, "-o", "temperature", "0", QUESTION)


def second_turn() -> None:
    assert command("-m", MODEL, "-c", "What does os.getcwd do?")


def tools() -> None:
    chain = llm.get_model(MODEL).chain(
        "What is the weather in Rome?", tools=[weather], key="none", options={"temperature": 0}
    )
    chain.text()
    assert len(list(chain.responses())) >= 2


def unstreamed_tools() -> None:
    chain = llm.get_model(MODEL).chain(
        "What is the weather in Rome?", tools=[weather], key="none", stream=False
    )
    chain.text()


def structured_output() -> None:
    answer = llm.get_model(MODEL).prompt(QUESTION, schema=Weather, key="none", temperature=0)
    Weather.model_validate_json(answer.text())


def terse_schema() -> None:
    command("-m", MODEL, "--schema", "ok bool, level int", "-o", "max_tokens", "200", QUESTION)


def image() -> None:
    picture = llm.Attachment(url=RED_SQUARE, type="image/png")
    answer = llm.get_model(MODEL).prompt("What shape?", attachments=[picture], key="none")
    assert answer.text()


def large_max_tokens() -> None:
    assert ANSWER in command(
        "-m", MODEL, "-o", "temperature", "0", "-o", "max_tokens", "4096", QUESTION
    )


def too_long() -> None:
    with refused(AssertionError, "maximum context length"):
        command("-m", MODEL, TOO_LONG)


run(globals())
