"""`openai` for Python: files and batches, and the command that runs one from a terminal."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion
from typer.testing import CliRunner

from serve_app.commands.cli import app
from tests.clients.questions import ANSWERS, MODEL, NAME
from tests.clients.snippet import run_snippet
from tests.engines import only_raystream
from tests.serve_app.local_server import LocalServer

pytestmark = [only_raystream("its lines ask models of all tasks"), pytest.mark.slow]

CHAT = "/v1/chat/completions"
DEADLINE_S = 60
QUESTION: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"What does {NAME} do?"}],
    "temperature": 0,
}


def lines(bodies: Mapping[str, Mapping[str, Any]], url: str = CHAT) -> str:
    return "".join(
        json.dumps({"custom_id": id_, "method": "POST", "url": url, "body": body}) + "\n"
        for id_, body in bodies.items()
    )


def run(client: openai.OpenAI, text: str, endpoint: Any = CHAT) -> Batch:
    file = client.files.create(file=("batch.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    deadline_s = time.monotonic() + DEADLINE_S
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: openai.OpenAI, id_: str | None) -> dict[str, Any]:
    assert id_ is not None
    found = map(json.loads, client.files.content(id_).text.splitlines())
    return {each["custom_id"]: each for each in found}


def counted(answer: ChatCompletion) -> tuple[int, int]:
    """Return the lengths of prompt and answer; what was cached depends on earlier requests."""
    assert answer.usage is not None
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


# OpenAI's example leaves its file open.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*batchinput")
def test_the_example_of_openai_runs_as_it_stands(
    local: LocalServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippet("Batches: openai for Python", local)
    status, *answers = capsys.readouterr().out.splitlines()
    assert status == "completed BatchRequestCounts(completed=2, failed=0, total=2)"
    assert f"request-0 {ANSWERS[NAME]}" in answers


def test_answers_are_those_of_requests(client: openai.OpenAI) -> None:
    seeded = {**QUESTION, "temperature": 1.0, "seed": 7}
    shape = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    held = {"type": "json_schema", "json_schema": {"name": "a", "schema": shape}}
    bodies = {
        "greedy": QUESTION,
        "seeded": seeded,
        "held": {**seeded, "response_format": held},
        "wrong": {**QUESTION, "seedling": 1},
    }
    batch = run(client, lines(bodies))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (3, 1)
    answers = results(client, batch.output_file_id)
    for name, found in answers.items():
        direct = client.chat.completions.create(**bodies[name])
        answer = ChatCompletion.model_validate(found["response"]["body"])
        assert answer.choices == direct.choices
        assert counted(answer) == counted(direct)
    errors = results(client, batch.error_file_id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**QUESTION, extra_body={"seedling": 1})
    assert errors["wrong"]["response"]["body"]["error"] == caught.value.body


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/embeddings", {"model": "pydoc-search", "input": "a"}),
        ("/v1/classify", {"model": "pydoc-detector", "input": "a"}),
        ("/v1/rerank", {"model": "pydoc-search", "query": "a", "documents": ["b", "c"]}),
        ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 4}),
    ],
)
def test_models_of_each_task_answer(
    client: openai.OpenAI, endpoint: str, body: dict[str, Any]
) -> None:
    batch = run(client, lines({"a": body}, endpoint), endpoint)
    assert results(client, batch.output_file_id)["a"]["response"]["status_code"] == 200


def test_files_and_batches_are_listed_page_by_page(client: openai.OpenAI) -> None:
    made = [client.files.create(file=("a", b"{}"), purpose="batch").id for _ in range(3)]
    listed = [file.id for file in client.files.list(limit=2)]
    assert [id_ for id_ in listed if id_ in made] == made[::-1]
    assert client.files.retrieve(made[0]).filename == "a"
    assert client.files.delete(made[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0])
    batches = [run(client, "") for _ in range(3)]
    assert {batch.status for batch in batches} == {"failed"}
    ids = [batch.id for batch in client.batches.list(limit=2)]
    assert [id_ for id_ in ids if id_ in {each.id for each in batches}] == [
        each.id for each in batches[::-1]
    ]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(ids[0])


def test_the_command_writes_the_results_beside_the_file(local: LocalServer, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(lines({"good": {**QUESTION, "max_tokens": 2}}))
    with local.listening() as url:
        ran = CliRunner().invoke(app, ["batch", str(file), "--url", url])
        assert ran.exit_code == 0, ran.output
        (answer,) = (tmp_path / "questions.output.jsonl").read_text().splitlines()
        assert json.loads(answer)["custom_id"] == "good"
        assert not (tmp_path / "questions.errors.jsonl").exists()
        id_ = next(word for word in ran.output.split() if word.startswith("batch_"))
        again = CliRunner().invoke(
            app, ["batch", id_, "--url", url, "--output", str(tmp_path / "again.jsonl")]
        )
        assert again.exit_code == 0, again.output
        assert (tmp_path / "again.jsonl").read_text() == f"{answer}\n"
        file.write_text(lines({"good": QUESTION, "bad": {}}))
        ran = CliRunner().invoke(app, ["batch", str(file), "--url", url])
        assert ran.exit_code == 1
        (error,) = (tmp_path / "questions.errors.jsonl").read_text().splitlines()
        assert json.loads(error)["custom_id"] == "bad"
        file.write_text("no request")
        ran = CliRunner().invoke(app, ["batch", str(file), "--url", url])
        assert (ran.exit_code, "is no request" in ran.output) == (1, True)
