"""`raystream chat` as a program of its own: on a terminal, and between pipes."""

import asyncio
import io
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serve_app.client.chat_client import ChatClient, ChatError
from serve_app.commands.run.server_record import FoundServer, ServerRecord
from serve_app.commands.user.chat.chat import Chat, key_for, url_of_own
from serve_app.commands.user.chat.conversation import Conversation
from tests.serve_app.client.fake_server import Answering, Write, chunk, end, refuses, says, serving

COMMAND = (sys.executable, "-m", "serve_app", "chat", "--url")
ANSWER = says(chunk("Join **two** "), b": moved\n\n", chunk("paths."), end(4))
KEYS = {"RAYSTREAM_API_KEY": "", "OPENAI_API_KEY": ""}

pytestmark = [pytest.mark.slow, pytest.mark.in_time]


async def piped(
    url: str, *arguments: str, question: str = "", **environment: str
) -> tuple[int | None, str, str]:
    """Run it without a terminal; return its exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        url,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **KEYS, **environment},
    )
    output, errors = await process.communicate(question.encode())
    return process.returncode, output.decode(), errors.decode()


async def test_a_question_from_standard_input_gets_the_bare_answer() -> None:
    async with serving(ANSWER) as (url, seen):
        code, output, errors = await piped(
            url, "--seed", "3", question="How?\n", RAYSTREAM_API_KEY="k", OPENAI_API_KEY="secret"
        )
    assert (code, output) == (0, "Join **two** paths.\n")
    notice, figures = errors.splitlines()
    assert notice == "moved"
    assert figures.startswith("first token after")
    (request,) = seen
    assert request["authorization"] == "Bearer k"
    assert (request["model"], request["seed"]) == ("chat", 3)
    assert request["messages"] == [{"role": "user", "content": "How?"}]
    assert "temperature" not in request


async def test_an_argument_is_the_question() -> None:
    async with serving(ANSWER) as (url, seen):
        options = ("--model", "other", "--system", "Be brief.")
        code, output, _ = await piped(url, "How?", *options)
    assert (code, output) == (0, "Join **two** paths.\n")
    assert [message["content"] for message in seen[0]["messages"]] == ["Be brief.", "How?"]
    assert seen[0]["model"] == "other"


async def test_errors_are_one_line_and_the_exit_code_1() -> None:
    async with serving(refuses(503, "", Retry_After="9")) as (url, _):
        code, output, errors = await piped(url, "How?")
        assert (code, output, errors.count("\n")) == (1, "", 1)
        assert errors.endswith("(try again in 9 s)\n")
        empty, _, errors = await piped(url)
        assert (empty, errors.startswith("Error: the question is empty")) == (1, True)
    gone, output, errors = await piped(url, "How?")
    assert (gone, output) == (1, "")
    assert errors.startswith("Error: nothing answers at")


async def test_an_answer_that_breaks_off_ends_its_line_and_fails() -> None:
    async with serving(says(chunk("Join"))) as (url, _):
        code, output, errors = await piped(url, "How?")
    assert (code, output) == (1, "Join\n")
    assert "lost before the end" in errors


class Terminal:
    """The program on a terminal."""

    def __init__(self, controller: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._controller = controller
        self._shown = ""

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    async def shows(self, text: str) -> str:
        """Wait until a text is shown; return what was shown until then."""
        loop = asyncio.get_running_loop()
        while text not in self._shown:
            ready = asyncio.Event()
            loop.add_reader(self._controller, ready.set)
            try:
                await asyncio.wait_for(ready.wait(), 20)
            except TimeoutError:
                pytest.fail(f"{text!r} was not shown, but {self._shown!r}")
            finally:
                loop.remove_reader(self._controller)
            self._shown += os.read(self._controller, 65536).decode("utf-8", "replace")
        before, _, self._shown = self._shown.partition(text)
        return before


@asynccontextmanager
async def on_terminal(url: str, *options: str) -> AsyncIterator[Terminal]:
    controller, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        url,
        *options,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, **KEYS, "TERM": "xterm", "COLUMNS": "300", "LINES": "24"},
        start_new_session=True,
        # Ctrl-C reaches the program as it does in a shell, whatever the tests' own process ignores.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(terminal)
    try:
        yield Terminal(controller, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(controller)


async def test_a_conversation_keeps_its_turns_until_it_is_cleared(tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    async with serving(ANSWER) as (url, seen), on_terminal(url) as terminal:
        await terminal.shows("chat at")
        terminal.type("How?\n")
        await terminal.shows("4 tokens")
        await terminal.shows("moved to another replica")
        terminal.type("/system Be brief.\n")
        await terminal.shows("is set")
        terminal.type("/model other\n")
        await terminal.shows("asking other")
        terminal.type("And \\\nthen?\n")
        await terminal.shows("4 tokens")
        terminal.type(f"/save {saved}\n")
        await terminal.shows("is written")
        terminal.type("/clear\n")
        await terminal.shows("forgotten")
        terminal.type("/nonsense\n")
        await terminal.shows("/help names")
        terminal.type("Again?\n")
        await terminal.shows("4 tokens")
        await terminal.shows("> ")  # until it reads, the terminal itself takes Ctrl-D
        terminal.type("\x04")
        assert await terminal.process.wait() == 0
    contents = [[message["content"] for message in each["messages"]] for each in seen]
    answer = "Join **two** paths."
    assert contents == [
        ["How?"],
        ["Be brief.", "How?", answer, "And \nthen?"],
        ["Be brief.", "Again?"],
    ]
    assert [each["model"] for each in seen] == ["chat", "other", "other"]
    assert json.loads(saved.read_text())["messages"][-1]["content"] == answer


def without_end(started: asyncio.Event, left: asyncio.Event) -> Answering:
    async def answer(_: dict[str, Any], write: Write) -> None:
        started.set()
        try:
            for i in range(100_000):
                await write(chunk(f"word{i} "))
                await asyncio.sleep(0.01)
        finally:
            left.set()

    return answer


async def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    started, left = asyncio.Event(), asyncio.Event()
    async with serving(without_end(started, left)) as (url, _), on_terminal(url) as terminal:
        await terminal.shows("chat at")
        terminal.type("How?\n")
        await terminal.shows("word3")
        os.kill(terminal.process.pid, signal.SIGINT)
        await terminal.shows("stopped")
        await left.wait()
        terminal.type("/quit\n")
        assert await terminal.process.wait() == 0


async def test_an_error_does_not_end_the_conversation() -> None:
    async with serving(refuses(429, "", Retry_After="9")) as (url, _), on_terminal(url) as terminal:
        await terminal.shows("chat at")
        for _ in range(2):
            terminal.type("How?\n")
            await terminal.shows("try again in 9 s")
        terminal.type("/help\n")
        await terminal.shows("/quit")
        terminal.type("/quit\n")
        assert await terminal.process.wait() == 0


def server(url: str | None, *, is_alive: bool = True) -> FoundServer:
    record = ServerRecord(1, 0.0, ("driver",), file="/f.yaml", url=url)
    return FoundServer(Path("/tmp"), record, is_alive=is_alive)


def test_without_a_url_the_user_s_own_server_is_asked() -> None:
    killed, starting = server("http://127.0.0.1:9", is_alive=False), server(None)
    assert url_of_own([killed, starting]) == "http://127.0.0.1:8000/v1"
    one, two = server("http://127.0.0.1:8471"), server("http://127.0.0.1:8472/llm")
    assert url_of_own([killed, starting, one]) == "http://127.0.0.1:8471/v1"
    with pytest.raises(ChatError) as refused:
        url_of_own([one, two])
    assert str(refused.value) == (
        "2 servers of yours run; name one by --url: http://127.0.0.1:8471/v1 (/f.yaml); "
        "http://127.0.0.1:8472/llm/v1 (/f.yaml)"
    )


@pytest.mark.parametrize(
    ("url", "key"),
    [("https://a.example/v1", "k"), ("http://127.0.0.1:8000/v1", None), (None, None)],
)
def test_openai_s_key_is_sent_only_encrypted(url: str | None, key: str | None) -> None:
    assert key_for(url, {"OPENAI_API_KEY": "k"}) == key


@pytest.mark.parametrize("name", ["'it", "~nobodyx/f", "\ud800", "/nowhere/file"])
def test_a_name_that_can_t_be_saved_under_does_not_end_the_conversation(name: str) -> None:
    output = io.StringIO()
    conversation = Conversation("chat", {}, None)
    chat = Chat(ChatClient("http://127.0.0.1:1"), conversation, Console(file=output, width=200))
    chat._save(name)
    assert "is written" not in output.getvalue()
    assert output.getvalue().encode()
