"""What real clients send, sent again; see `tests.clients.real.record`."""

import json
from typing import Any

import httpx2
import pytest

from tests.clients.real.record import FOLDER, path_of, read
from tests.clients.real.recorder import Recorded
from tests.engines import only_raystream
from tests.offenders import every, for_each
from tests.serve_app.local_server import LocalServer

CLIENTS = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
TOO_LONG = "too_long"
"""The step in which each client sends a prompt that no model could take."""


def send(local: LocalServer, request: Recorded) -> httpx2.Response:
    with local.client() as http:
        return http.request(request.method, request.path, json=request.body)


def is_streamed(request: Recorded) -> bool:
    return isinstance(request.body, dict) and bool(request.body.get("stream"))


def has_ended(path: str, stream: str) -> bool:
    """Return whether a stream holds its last event: only chats and completions have a `[DONE]`."""
    last = stream.rstrip().rpartition("\n\n")[2]
    if path.startswith("/v1/messages"):
        return last.startswith("event: message_stop\n")
    if path == "/v1/responses":
        return last.startswith(("event: response.completed\n", "event: response.incomplete\n"))
    return last == "data: [DONE]"


@only_raystream("clients ask models of all tasks, one of them with prompts of 10,000 tokens")
@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_client_sends_is_answered(local: LocalServer, client: str) -> None:
    for case in every(each for each in read(client) if each.step != TOO_LONG):
        with case as request:
            answer = send(local, request)
            assert answer.is_success, answer.text
            if is_streamed(request):
                assert has_ended(request.path, answer.text), answer.text[-500:]


@only_raystream("clients ask models of all tasks, one of them with prompts of 10,000 tokens")
def test_a_prompt_that_is_too_long_is_refused_in_openais_words(local: LocalServer) -> None:
    sent = [(client, request) for client in CLIENTS for request in read(client)]
    for case in every(each for each in sent if each[1].step == TOO_LONG):
        with case as (_client, request):
            answer = send(local, request)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            said = error["message"].removeprefix(f"{error['param']}: ")
            assert said.startswith("This model's maximum context length is ")


@for_each(*CLIENTS)
def test_a_recording_holds_nothing_of_the_machine_that_made_it(client: str) -> None:
    text = path_of(client).read_text()
    assert "authorization" not in text.lower()
    assert not any(folder in text for folder in ("/home/", "/root/", "/tmp/", "/Users/"))
    for line in text.splitlines():
        found: dict[str, Any] = json.loads(line)
        assert set(found) == {"step", "method", "path", "body"}
