"""`serve run serve_config.yaml`, as people start it, in both of Serve's modes."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import openai
import pytest
import yaml
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.free_port import free_port
from models.training.corpus import load_corpus
from models.training.drawings import answer_about, random_drawing
from tests.images import data_uri
from tests.ray.serve_run import (
    READY_DEADLINE_S,
    ROOT,
    STOP_DEADLINE_S,
    Server,
    haproxy_environment,
    wait_until,
)

ANSWERS = {entry.name: entry.answer for entry in load_corpus()}

pytestmark = pytest.mark.slow


def shipped_config(folder: Path) -> Path:
    """Return the shipped file, on a port that is free."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module", params=["plain", "haproxy"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    environment = {**os.environ, "HOME": str(folder)}
    if request.param == "haproxy":
        environment |= haproxy_environment()
    started = Server(shipped_config(folder), folder / "serve.log", environment)
    try:
        wait_until(started.is_ready, READY_DEADLINE_S)
        yield started
    finally:
        started.kill()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as client:
        yield client


def question(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_the_shipped_model_answers_truly_streamed_and_whole(client: openai.OpenAI) -> None:
    messages = question("What does os.path.join do?")
    whole = client.chat.completions.create(model="pydoc-chat", messages=messages)
    stream = client.chat.completions.create(model="pydoc-chat", messages=messages, stream=True)
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert whole.choices[0].message.content == ANSWERS["os.path.join"]
    assert "".join(chunks) == ANSWERS["os.path.join"]
    assert len([chunk for chunk in chunks if chunk]) > 5
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


def test_ctrl_c_ends_it_soon_and_leaves_no_process_behind(server: Server) -> None:
    """The last test of each mode, as it ends the server; a stream is open meanwhile."""
    body = {"messages": question("Explain textwrap.dedent."), "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/text-generation", json=body, timeout=30) as stream:
        next(stream.iter_lines())
        assert server.interrupt() < STOP_DEADLINE_S
    wait_until(lambda: not server.survivors(), STOP_DEADLINE_S)
