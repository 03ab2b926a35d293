"""The shipped file served as `make serve` does; without HAProxy only in the soak."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from models.training.corpus import load_corpus
from models.training.drawings import answer_about, random_drawing
from tests.images import data_uri
from tests.measured import Record
from tests.ray.serve_run import READY_DEADLINE_S, STOP_DEADLINE_S, Server, wait_until
from tests.recording_proxy import RecordingProxy

ANSWERS = {entry.name: entry.answer for entry in load_corpus()}

JSON = {"content-type": "application/json"}

LAST_LINE = "Ctrl-C stops the server."

pytestmark = pytest.mark.slow


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
    assert [line for line in information if " is ready after " not in line] == []
    ready = {line.split(" -- ")[1].split(" is ready after")[0] for line in information}
    # Tests of other modules may have deployed more models beside them.
    assert ready >= {"pydoc-chat", "pydoc-detector", "pydoc-search"}
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


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOO_LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 9000}]}
BROKEN_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", TOO_LONG),
    ("/v1/chat/completions", {**TOO_LONG, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"unknown": 1}}),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"999999": 1}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [BROKEN_IMAGE]}]}),
    ("/v1/completions", {"prompt": [999999]}),
    ("/tokenize", {"prompt": "\ud800"}),
    ("/detokenize", {"tokens": [999999]}),
    ("/v1/embeddings", {"input": "word " * 9000}),
    ("/v1/embeddings", {"input": [[999999]]}),
    ("/classify", {"input": "word " * 9000}),
]
"""Faults that only a replica finds: one of each method, and of each kind."""


def test_a_client_s_fault_is_one_line_and_neither_an_error_nor_a_traceback_in_any_log(
    server: Server, screen: list[str]
) -> None:
    told = next(line for line in screen if line.startswith("Logs, with a line of JSON"))
    logs = Path(told.split(": ")[1])
    before = {file: file.stat().st_size for file in (server.log, *logs.glob("replica_*.log"))}

    def written() -> str:
        """Return what the ingress and the replicas have written since, and the terminal shows."""
        return "".join(file.read_bytes()[size:].decode() for file, size in before.items())

    models = {"/v1/embeddings": "pydoc-search", "/classify": "pydoc-detector"}
    ids = []
    for path, body in REFUSED:
        named = {"model": models.get(path, "pydoc-chat"), **body}
        answer = httpx.post(f"{server.url}{path}", content=json.dumps(named), headers=JSON)
        assert answer.status_code == 400, (path, answer.text)
        ids.append(answer.headers["x-request-id"])
    lines = [f'"request_id":"{each}"' for each in ids]
    wait_until(lambda: all(line in written() for line in lines), STOP_DEADLINE_S)
    # A replica that raises has logged it before the client has the answer.
    assert [written().count(line) for line in lines] == [1] * len(lines)
    assert not re.findall("^.*(?:WARNING|ERROR|Traceback).*$", written(), re.MULTILINE)


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


def test_ctrl_c_stops_the_server_which_leaves_no_process_behind(
    server: Server, record: Record
) -> None:
    """Stop the server while a stream is open. This ends the server, so it is the last test."""
    body = {"messages": question("Explain textwrap.dedent."), "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/text-generation", json=body, timeout=30) as stream:
        next(stream.iter_lines())
        before = server.log.read_text()
        record("seconds from Ctrl-C until the server had ended", round(server.interrupt(), 1))
    assert server.process.returncode == 0, "its supervisor did not have to kill it"
    wait_until(lambda: not server.survivors(), STOP_DEADLINE_S)
    after = server.log.read_text().removeprefix(before)
    assert after.splitlines()[-1] == "Stopped."
    assert "Traceback" not in after
