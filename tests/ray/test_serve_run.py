"""The shipped file served as `make serve` does; without HAProxy only in the soak."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from models.training.corpus import load_corpus
from models.training.drawings import answer_about, random_drawing
from tests.images import data_uri
from tests.ray.serve_run import (
    READY_DEADLINE_S,
    STOP_DEADLINE_S,
    Server,
    wait_until,
)
from tests.recording_proxy import RecordingProxy

ANSWERS = {entry.name: entry.answer for entry in load_corpus()}

LAST_LINE = "Ctrl-C stops the server."

pytestmark = pytest.mark.slow


@pytest.fixture
def server(shipped_server: Server) -> Server:
    return shipped_server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


@pytest.fixture
def screen(server: Server) -> list[str]:
    """Return the lines on the screen when the server has told that it is ready."""
    wait_until(lambda: LAST_LINE in server.log.read_text(), READY_DEADLINE_S)
    return server.log.read_text().splitlines()


def question(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_the_last_lines_tell_the_address_the_models_a_request_and_the_dashboard(
    server: Server, screen: list[str]
) -> None:
    ready = next(i for i, line in enumerate(screen) if line.startswith("raystream is ready"))
    tail = screen[ready : screen.index(LAST_LINE) + 1]
    assert tail[0].endswith(f" s: {server.url}")
    models = "pydoc-chat (generate), pydoc-detector (classify), pydoc-search (embed)"
    assert tail[1] == f"Models: {models}"
    assert tail[2] == "Try:"
    assert tail[3].startswith(f"  curl -N --noproxy '*' {server.url}/v1/chat/completions")
    assert tail[5] == f"The page to chat, search and watch: {server.url}/"
    assert tail[6] == f"The API's description: {server.url}/docs"
    dashboard = tail[7].split()[2]
    assert httpx.get(dashboard, timeout=10).status_code == 200


def test_the_request_on_the_screen_streams_an_answer_as_it_stands(screen: list[str]) -> None:
    command = "\n".join(screen[screen.index("Try:") + 1 : screen.index("Try:") + 3])
    answer = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    assert answer.startswith("data: {")
    assert answer.rstrip().endswith("data: [DONE]")


def test_of_the_workers_lines_only_warnings_and_ready_models_are_on_the_screen(
    server: Server, client: openai.OpenAI, screen: list[str]
) -> None:
    client.models.list()
    information = [line for line in server.log.read_text().splitlines() if " INFO " in line]
    ready = {line.split(" -- ")[1].split(" is ready after")[0] for line in information}
    assert ready == {"pydoc-chat", "pydoc-detector", "pydoc-search"}
    assert "Loading weights" not in server.log.read_text()


def test_serve_s_files_hold_what_the_screen_does_not(
    client: openai.OpenAI, screen: list[str]
) -> None:
    sent = client.models.with_raw_response.list().headers["x-request-id"]
    told = next(line for line in screen if line.startswith("Logs, with a line of JSON"))
    logs = Path(told.split(": ")[1])
    (controller,) = logs.glob("controller_[0-9]*.log")
    assert "INFO" in controller.read_text()
    ingresses = list(logs.glob("replica_raystream_Ingress_*.log"))
    line = f'"request_id":"{sent}"'
    wait_until(lambda: any(line in file.read_text() for file in ingresses), STOP_DEADLINE_S)


def test_the_shipped_model_answers_correctly_streamed_and_unstreamed(client: openai.OpenAI) -> None:
    messages = question("What does os.path.join do?")
    whole = client.chat.completions.create(model="pydoc-chat", messages=messages)
    stream = client.chat.completions.create(model="pydoc-chat", messages=messages, stream=True)
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert whole.choices[0].message.content == ANSWERS["os.path.join"]
    assert "".join(chunks) == ANSWERS["os.path.join"]
    assert whole.choices[0].finish_reason == "stop"


def test_a_drawing_is_named(client: openai.OpenAI) -> None:
    drawing = random_drawing(Random(2026))
    answer = client.chat.completions.create(
        model="pydoc-chat",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_uri(drawing.render())}},
                    {"type": "text", "text": "What is in the picture?"},
                ],
            }
        ],
    )
    assert answer.choices[0].message.content == answer_about(drawing)


def test_no_call_inside_the_server_goes_through_the_proxy_of_its_environment(
    client: openai.OpenAI, proxy: RecordingProxy
) -> None:
    client.embeddings.create(model="pydoc-search", input="Join two paths.")
    assert proxy.asked == []


def test_ctrl_c_stops_the_server_soon_and_leaves_no_process_behind(server: Server) -> None:
    """Stop the server while a stream is open. This ends the server, so it is the last test."""
    body = {"messages": question("Explain textwrap.dedent."), "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/text-generation", json=body, timeout=30) as stream:
        next(stream.iter_lines())
        before = server.log.read_text()
        assert server.interrupt() < STOP_DEADLINE_S
    wait_until(lambda: not server.survivors(), STOP_DEADLINE_S)
    after = server.log.read_text().removeprefix(before)
    assert after.splitlines()[-1] == "Stopped."
    assert "Traceback" not in after
