import json
import shlex
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from deployments.contract.model_spec import ModelConfig
from serve_app.commands.run.announcement import (
    Announcement,
    StartFailedError,
    is_ready,
    local_url,
    wait_until_ready,
)
from tests.failing import failing
from tests.offenders import for_each
from tests.serve_app.tls_server import certify
from tests.threaded_server import answering

if TYPE_CHECKING:
    from serve_app.commands.run.start_screen import StartScreen

CHAT = ModelConfig(id="chat", source="x")
DETECTOR = ModelConfig(id="detector", source="x", task="classify")
EMBEDDER = ModelConfig(id="embedder", source="x", task="embed")


class FakeServer(ThreadingHTTPServer):
    """Answers `GET /v1x/ready` with the statuses of a script, the last one for ever."""

    def __init__(self, statuses: Sequence[int]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses = list(statuses)
        self.paths: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:  # http.server's name
        self.server.paths.append(self.path)
        statuses = self.server.statuses
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer([503, 404, 200])
    with answering(server):
        yield server


def announcement(
    url: str = "http://127.0.0.1:8000",
    models: Sequence[ModelConfig] = (CHAT, DETECTOR),
    needs_key: bool = False,
    dashboard_url: str | None = "http://127.0.0.1:8265",
) -> Announcement:
    return Announcement(url, models, needs_key, dashboard_url, "/tmp/logs")


def command(announced: Announcement) -> list[str]:
    return shlex.split(announced.request().replace("\\\n", " "))


class FakeScreen:
    """Notes what is awaited."""

    def __init__(self) -> None:
        self.shown: list[Sequence[str]] = []

    @property
    def awaited(self) -> Sequence[str]:
        return self.shown[-1]

    @awaited.setter
    def awaited(self, names: Sequence[str]) -> None:
        self.shown.append(names)


def wait(server: FakeServer, pending: Callable[[], Sequence[str]], prefix: str = "") -> FakeScreen:
    url = local_url("127.0.0.1", server.server_port, f"/{prefix}")
    screen = FakeScreen()
    wait_until_ready(announcement(url), pending, cast("StartScreen", screen), poll_s=0.001)
    return screen


def test_the_server_is_asked_until_it_answers_that_it_is_ready(server: FakeServer) -> None:
    screen = wait(server, list, "prefix")
    assert server.paths == ["/prefix/ready"] * 3
    assert screen.shown == [("GET /ready",)] * 2


def test_the_server_is_not_asked_while_deployments_are_pending(server: FakeServer) -> None:
    pending = [["chat", "Ingress"], ["chat"], []]
    asked: list[int] = []

    def next_pending() -> list[str]:
        asked.append(len(server.paths))
        return pending.pop(0) if pending else []

    screen = wait(server, next_pending)
    assert asked == [0, 0, 0, 1, 2]
    assert screen.shown[:2] == [["chat", "Ingress"], ["chat"]]


def test_a_start_that_fails_is_not_waited_for(server: FakeServer) -> None:
    with pytest.raises(StartFailedError, match="no such model"):
        wait(server, failing(StartFailedError("no such model")))


def test_a_server_that_does_not_listen_is_not_ready(server: FakeServer) -> None:
    assert not is_ready("http://127.0.0.1:1")


def test_a_server_of_https_is_asked_whomever_its_certificate_names(
    server: FakeServer, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certify(tmp_path, "llm.example"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.statuses = [200]
    url = local_url("127.0.0.1", server.server_port, "/", has_tls=True)
    assert url.startswith("https://127.0.0.1:")
    assert is_ready(url)
    assert not is_ready(url.replace("https", "http", 1))


def test_the_request_to_a_server_of_https_skips_the_check_of_its_certificate() -> None:
    words = command(announcement("https://127.0.0.1:8000"))
    assert words[:4] == ["curl", "-N", "-k", "https://127.0.0.1:8000/v1/chat/completions"]
    assert "-k" not in command(announcement())


def test_the_request_asks_no_proxy() -> None:
    words = command(replace(announcement(), has_proxy=True))
    assert words[:4] == ["curl", "-N", "--noproxy", "*"]
    assert "--noproxy" not in command(announcement())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::0", "http://[::1]:8000"),
        ("127.0.0.2", "http://127.0.0.2:8000"),
        ("::1", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_this_machine_reaches_every_host(host: str, url: str) -> None:
    assert local_url(host, 8000, "/") == url


def test_the_request_asks_the_first_model_that_generates_and_streams() -> None:
    words = command(announcement(models=(DETECTOR, CHAT)))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("chat", True)


def test_without_a_model_that_generates_the_request_classifies() -> None:
    words = command(announcement(models=(DETECTOR,)))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/classify"]
    assert json.loads(words[-1])["model"] == "detector"


def test_a_model_that_embeds_is_asked_for_embeddings() -> None:
    words = command(announcement(models=(EMBEDDER,)))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/embeddings"]


def a_folder(folder: Path, **files: object) -> str:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_a_base_model_is_asked_to_go_on_with_a_text(tmp_path: Path) -> None:
    source = a_folder(tmp_path, config={}, tokenizer_config={"model_max_length": 8})
    base = ModelConfig(id="base", source=source)
    words = command(announcement(models=(base,)))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("base", True)
    assert isinstance(body["prompt"], str)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert command(announcement(models=(base,)))[2].endswith("/v1/chat/completions")


def test_a_cross_encoder_is_asked_to_rank(tmp_path: Path) -> None:
    labels = {"0": "LABEL_0"}
    source = a_folder(tmp_path, config={"id2label": labels})
    ranker = ModelConfig(id="ranker", source=source, task="classify")
    words = command(announcement(models=(ranker,)))
    assert words[1] == "http://127.0.0.1:8000/v1/rerank"
    assert set(json.loads(words[-1])) == {"model", "query", "documents"}
    a_folder(tmp_path, config={"id2label": {**labels, "1": "LABEL_1"}})
    assert command(announcement(models=(ranker,)))[1].endswith("/v1/classify")


def test_a_server_without_haproxy_warns_and_one_that_another_shows_names_no_ctrl_c() -> None:
    assert "HAProxy" not in announcement().text(1.0)
    found = replace(announcement(), has_haproxy=False, is_driven=False).text(1.0)
    assert "Warning: HAProxy does not stand in front" in found
    assert "Ctrl-C" not in found


def test_with_keys_the_request_sends_one_and_no_page_is_named_that_needs_one() -> None:
    announced = announcement(needs_key=True)
    assert "Authorization: Bearer KEY" in command(announced)
    assert "one of your keys" in announced.text(3.0)
    assert "/docs" not in announced.text(3.0)
    assert "The page to chat, search and watch: http://127.0.0.1:8000/\n" in announced.text(3.0)
    assert "Authorization" not in announcement().text(3.0)


def test_the_text_names_address_models_dashboard_and_logs() -> None:
    lines = announcement().text(41.6).splitlines()
    assert lines[1] == "raystream is ready after 42 s: http://127.0.0.1:8000"
    assert lines[2] == "Models: chat (generate), detector (classify)"
    assert any(line.startswith("Ray's dashboard: http://127.0.0.1:8265 ") for line in lines)
    assert lines[-2].endswith(": /tmp/logs")


def test_a_dashboard_that_does_not_run_is_not_named() -> None:
    assert "dashboard" not in announcement(dashboard_url=None).text(1.0)


@for_each(
    ("127.0.0.1", "/", "http://127.0.0.1:80"),
    ("0.0.0.0", "/", "http://127.0.0.1:80"),
    ("::", "/", "http://[::1]:80"),
    ("fd00::1", "/llm", "http://[fd00::1]:80/llm"),
    ("gpu-box", "/llm/", "http://gpu-box:80/llm"),
)
def test_the_address_is_one_that_this_machine_reaches(host: str, prefix: str, url: str) -> None:
    assert local_url(host, 80, prefix) == url
