"""The page's requests as code: a program that runs it makes the request again."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.contract.messages import ChatMessage, TextPart
from tests.node_packages import install
from tests.serve_app.apps import ALICE, ring
from tests.serve_app.playground.node_program import MODULES, NODE, PACKAGES
from tests.serve_app.playground.served_page import Models, serving

QUESTION = "What's \"this\"?\n'\\n'"
MADE: list[dict[str, Any]] = [
    {
        "kind": "chat",
        "body": {
            "model": "m",
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
            "top_k": 5,
        },
    },
    {"kind": "classify", "body": {"model": "c", "input": "it's small", "truncate": True}},
    {"kind": "embeddings", "body": {"model": "e", "input": ["abc"]}},
    {"kind": "completion", "body": {"model": "m", "prompt": "Once", "stream": True, "min_p": 0.1}},
]


async def printed_by(*program: str, given: str = "", env: Mapping[str, str] | None = None) -> str:
    """Run a program; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *program,
        cwd=PACKAGES,
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(given.encode())
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def code_for(url: str, key: str = "") -> list[dict[str, str]]:
    """Return each request as code, by its language."""
    program = (NODE, str(MODULES / "code.mjs"))
    told = await printed_by(*program, given=json.dumps(MADE), env={"PAGE": f"{url}/", "KEY": key})
    code: list[dict[str, str]] = json.loads(told)
    return code


@pytest.mark.slow
@pytest.mark.parametrize("language", ["curl", "Python", "JavaScript"])
async def test_each_request_as_code_makes_the_same_request_again(
    models: Models, monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    program = {
        "curl": ("bash", "-c"),
        "Python": (sys.executable, "-c"),
        "JavaScript": (NODE, "--input-type=module", "-e"),
    }[language]
    if language == "JavaScript":
        await asyncio.to_thread(install, PACKAGES)
    async with serving(models, monkeypatch) as url:
        chat, classified, embedded, continued = [
            await printed_by(*program, code[language]) for code in await code_for(url)
        ]
    assert "world" in chat if language == "curl" else chat == "Hello, world!"
    assert "world" in continued if language == "curl" else continued == "Hello, world!"
    asked, text = models.chat.requests
    assert (text.prompt, text.sampling.min_p) == ("Once", 0.1)
    assert asked.prompt == (ChatMessage("user", (TextPart(QUESTION),)),)
    assert asked.sampling.top_k == 5
    assert "small" in classified
    assert [request.texts for request in models.classifier.requests] == [("it's small",)]
    assert '"embedding"' in embedded if language == "curl" else embedded.split() == ["1", "4"]
    assert [request.texts for request in models.embedder.requests] == [("abc",)]


async def test_no_key_is_written_into_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Models(), monkeypatch, ring()) as url:
        (chat, *_) = await code_for(url, ALICE)
        assert ALICE not in "".join(chat.values())
        assert all("RAYSTREAM_API_KEY" in each for each in chat.values())
        told = await printed_by("bash", "-c", chat["curl"], env={"RAYSTREAM_API_KEY": ALICE})
    assert "world" in told
