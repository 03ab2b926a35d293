"""`raystream demo`: runs streams undisturbed, then again while a replica is killed.

With `--parking` it runs one at a server with one place, and then again while a chat goes first.
The last line is computed: text, counts and ends of both runs are compared. A difference, or a kill
or a chat that no stream has noticed, ends the command with 1.
"""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console

from serve_app.client.chat_client import ChatClient, ChatError
from serve_app.commands.user.chat.screens import harmless
from serve_app.commands.user.demo.replica_kill import kill_busiest
from serve_app.commands.user.demo.screens import DemoScreen
from serve_app.commands.user.demo.server import (
    ONE_PLACE,
    TWO_REPLICAS,
    DemoError,
    DemoServer,
    serving,
)
from serve_app.commands.user.demo.streams import BATCH, CHAT, QUESTIONS, DemoStream, Verdict

NONSENSE: Final = (
    "The model is tiny: beyond a docstring it writes nonsense, but the same nonsense each time."
)


def run_demo(*, is_plain: bool, keep: bool, svg: Path | None, parks: bool = False) -> int:
    """Show the demo; return the exit code.

    Args:
        is_plain: Write lines, even on a terminal.
        keep: Let the server run until Ctrl-C.
        svg: A file for a picture of what was shown.
        parks: Show how a stream is parked, instead of how streams outlive a replica.
    """
    console = Console(highlight=False, no_color=is_plain or None)
    screen = DemoScreen(console, is_plain=is_plain or not console.is_terminal)
    stopped_by = int(signal.SIGINT)

    def stop(number: int, _: FrameType | None) -> None:
        """End as Ctrl-C does: asyncio then ends in order what it runs."""
        nonlocal stopped_by
        stopped_by = number
        signal.raise_signal(signal.SIGINT)

    # A background job of a script ignores SIGINT, and would ignore these with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        return _show(screen, keep=keep, svg=svg, parks=parks)
    except (DemoError, ChatError) as error:
        sys.stderr.write(f"Error: {harmless(str(error))}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + stopped_by


def _show(screen: DemoScreen, *, keep: bool, svg: Path | None, parks: bool) -> int:
    if svg is not None:
        _require_writable(svg)
    started_s = time.monotonic()
    size, compare = (ONE_PLACE, _compare_parked) if parks else (TWO_REPLICAS, _compare_moved)
    with serving(lambda line: screen.tell(line, "dim"), size) as server:
        with screen.busy(f"Starting a server with {size.told} on this machine"):
            server.wait_until_ready()
        screen.tell(f"Ready after {time.monotonic() - started_s:.0f} s. The page: {server.url}/")
        screen.tell(NONSENSE, "dim")
        verdict = asyncio.run(compare(server, screen))
        screen.tell(verdict.text(), "bold green" if verdict.is_proof else "bold red")
        if svg is not None:
            try:
                screen.save_svg(svg)
            except OSError as error:
                raise DemoError(f"{svg}: {error.strerror}") from error
        if keep:
            screen.tell(f"The server stays until Ctrl-C: {server.url}/")
            with suppress(KeyboardInterrupt):
                signal.pause()
    return 0 if verdict.is_proof else 1


def _require_writable(file: Path) -> None:
    """Refuse a file that can't be written before a minute is spent on what is to be in it.

    Raises:
        DemoError: It can't be written.
    """
    place = file if file.exists() else file.absolute().parent
    if not place.exists():
        raise DemoError(f"{file}: there is no folder {place}")
    if file.is_dir() or not os.access(place, os.W_OK):
        raise DemoError(f"{file}: it can't be written")


async def _compare_moved(server: DemoServer, screen: DemoScreen) -> Verdict:
    """Run the streams twice, and kill a replica the second time."""
    client = ChatClient(server.url)
    undisturbed = [DemoStream(question) for question in QUESTIONS]
    started_s = time.monotonic()
    with screen.during(undisturbed, stay=False):
        await asyncio.gather(*(_read(client, stream) for stream in undisturbed))
    num_tokens = sum(stream.num_tokens for stream in undisturbed)
    seconds = time.monotonic() - started_s
    screen.tell(f"Undisturbed: 3 answers of {num_tokens} tokens together, in {seconds:.1f} s.")
    streams = [DemoStream(question) for question in QUESTIONS]
    with screen.during(streams, stay=True):
        reading = (_read(client, stream) for stream in streams)
        await asyncio.gather(*reading, kill_busiest(server, client, streams, screen))
    if screen.is_plain:
        for number, stream in enumerate(streams, 1):
            screen.tell(f"{number}: {stream.summary()}")
    return Verdict.of(streams, undisturbed)


async def _compare_parked(server: DemoServer, screen: DemoScreen) -> Verdict:
    """Run a batch's stream twice, the second time with a chat of a better priority beside it."""
    client = ChatClient(server.url)
    undisturbed, batch, chat = (DemoStream(question) for question in (BATCH, BATCH, CHAT))
    started_s = time.monotonic()
    with screen.during([undisturbed], stay=False):
        await _read(client, undisturbed)
    seconds = time.monotonic() - started_s
    screen.tell(f"Undisturbed: {undisturbed.num_tokens} tokens, in {seconds:.1f} s.")
    with screen.during([batch, chat], stay=True):
        await asyncio.gather(_read(client, batch), _read_once_under_way(client, chat, batch))
    if screen.is_plain:
        for number, stream in enumerate((batch, chat), 1):
            screen.tell(f"{number}: {stream.summary()}")
    return Verdict.of([batch], [undisturbed], "the batch was never parked")


async def _read_once_under_way(client: ChatClient, chat: DemoStream, batch: DemoStream) -> None:
    await batch.under_way.wait()
    await _read(client, chat)


async def _read(client: ChatClient, stream: DemoStream) -> None:
    await stream.read(client.stream(stream.question.body()))
