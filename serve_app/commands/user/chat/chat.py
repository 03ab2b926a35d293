"""`raystream chat`: asks, shows the answer, and asks again until Ctrl-D.

Ctrl-C stops an answer and keeps what has come of it. Without a terminal on both sides, standard
input is one question, and standard output gets the bare answer.
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from serve_app.client.chat_client import ChatClient, ChatError
from serve_app.commands.run.server_record import FoundServer, own_servers
from serve_app.commands.user.chat.answer import Answer
from serve_app.commands.user.chat.conversation import Conversation
from serve_app.commands.user.chat.screens import PlainScreen, TerminalScreen, harmless

PROMPT: Final = "> "
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
COUNTED: Final = {"stream_options": {"include_usage": True}}

DEFAULT_URL: Final = "http://127.0.0.1:8000/v1"

HELP: Final = """\
/system TEXT   set the system prompt; without TEXT, remove it
/model ID      ask another model; without ID, show which one is asked
/clear         forget the conversation
/save FILE     write the conversation, as the body of a request
/quit          end, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


class Chat:
    """A conversation with one server."""

    def __init__(self, client: ChatClient, conversation: Conversation, console: Console) -> None:
        """Begin.

        Args:
            client: The server.
            conversation: What the model is asked with.
            console: Where the conversation is shown.
        """
        self._client = client
        self._conversation = conversation
        self._console = console
        self._is_over = False
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: self._tell(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/model": self._set_model,
            "/save": self._save,
            "/quit": self._quit,
        }

    def talk(self, runner: asyncio.Runner) -> None:
        """Ask and answer until the user ends it."""
        with suppress(ImportError):
            import readline  # noqa: F401 # `input` edits lines and remembers them
        self._tell(f"{self._conversation.model} at {self._client.url}; /help, Ctrl-D ends")
        while not self._is_over:
            try:
                line = _read_lines()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                continue
            if line.startswith("/"):
                self._command(line)
            elif line.strip():
                self._ask(line, runner)

    def _ask(self, question: str, runner: asyncio.Runner) -> None:
        self._conversation.ask(question)
        answer = Answer()
        try:
            with TerminalScreen(self._console) as screen:
                body = {**self._conversation.body(), **COUNTED}
                runner.run(answer.read(self._client.stream(body), screen))
        except KeyboardInterrupt:
            self._tell("stopped")
        except ChatError as error:
            self._console.print(Text(harmless(str(error)), style="red"))
        if figures := answer.figures():
            self._tell(figures)
        self._conversation.answered(answer.text)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            self._tell(f"there is no {name}; /help names what there is")
        else:
            self._commands[name](rest.strip())

    def _clear(self, _: str) -> None:
        self._conversation.messages.clear()
        self._tell("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None
        self._tell("the system prompt is set" if text else "the system prompt is removed")

    def _set_model(self, model: str) -> None:
        if model:
            self._conversation.model = model
        self._tell(f"asking {self._conversation.model}")

    def _save(self, name: str) -> None:
        if not name:
            self._tell("name a file: /save FILE")
            return
        try:
            file = Path(shlex.split(name)[0] if name[0] in "'\"" else name)
            self._conversation.save(file.expanduser())
        except OSError as error:
            self._tell(f"{name}: {error.strerror}")
        except (ValueError, RuntimeError) as error:  # no closing quote, no such home, surrogates
            self._tell(f"{name}: {error}")
        else:
            self._tell(f"{file} is written")

    def _quit(self, _: str) -> None:
        self._is_over = True

    def _tell(self, text: str) -> None:
        self._console.print(Text(harmless(text), style="dim"))


def _read_lines() -> str:
    """Return what the user types, with the lines that a backslash adds."""
    line = input(PROMPT)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("  ")
    return line


def run_chat(
    url: str | None,
    api_key: str | None,
    question: str | None,
    model: str | None,
    system: str | None,
    sampling: Mapping[str, Any],
) -> int:
    """Hold a conversation, or ask one question; return the exit code.

    Without a URL the server is asked that this user runs on this machine.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        with asyncio.Runner() as runner:
            client = ChatClient(url or url_of_own(own_servers(os.environ)), api_key)
            chosen = model or runner.run(client.first_generator())
            conversation = Conversation(chosen, sampling, system)
            if is_terminal and question is None:
                Chat(client, conversation, Console(highlight=False)).talk(runner)
            else:
                asked = sys.stdin.read() if question is None else question
                runner.run(_answer_once(client, conversation, asked))
    except ChatError as error:
        sys.stderr.write(f"Error: {harmless(str(error))}\n")
        return 1
    except BrokenPipeError:  # as of `| head -1`
        # Python flushes standard output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def url_of_own(servers: Sequence[FoundServer]) -> str:
    """Return where the API of this user's only server begins; the usual place if none is known.

    Raises:
        ChatError: There are several.
    """
    found = [each.record for each in servers if each.is_alive and each.record.url is not None]
    if len(found) > 1:
        names = "; ".join(f"{record.url}/v1 ({record.served})" for record in found)
        raise ChatError(f"{len(found)} servers of yours run; name one by --url: {names}")
    return f"{found[0].url}/v1" if found else DEFAULT_URL


def key_for(url: str | None, environment: Mapping[str, str]) -> str | None:
    """Return OPENAI_API_KEY if it may be sent there: encrypted, and so never to a local port."""
    is_encrypted = url is not None and url.lower().startswith("https://")
    return environment.get("OPENAI_API_KEY") or None if is_encrypted else None


async def _answer_once(client: ChatClient, conversation: Conversation, question: str) -> None:
    if not question.strip():
        raise ChatError("the question is empty; write it to standard input, or as an argument")
    conversation.ask(question.strip())
    screen = PlainScreen(sys.stdout, sys.stderr)
    answer = Answer()
    try:
        await answer.read(client.stream({**conversation.body(), **COUNTED}), screen)
    finally:
        screen.end()
    if figures := answer.figures():
        screen.notice(figures)
