"""`raystream batch`: runs a file of requests, shows how far it is, and writes what came of it."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.client.batch_client import BatchClient, BatchState
from serve_app.client.chat_client import ChatClient, ChatError, UnavailableError
from serve_app.commands.run.server_record import own_servers
from serve_app.commands.user.chat.chat import INTERRUPTED, url_of_own
from serve_app.commands.user.chat.screens import harmless

POLL_S: Final = 1.0

MAX_WAIT_S: Final = 30.0
"""The longest wait before a server that did not answer is asked again; the waits double."""

GIVE_UP_S: Final = 1800.0
"""How long a server may be silent: a redeploy or a new node takes minutes. The batch goes on."""

T = TypeVar("T")

ID_PREFIX: Final = "batch_"
"""What a batch's id begins with, and hardly any file's name."""


def run_batch(
    file: str, output: Path | None, window: str, url: str | None, api_key: str | None
) -> int:
    """Run a file as a batch, or wait for one; return the exit code.

    Args:
        file: The file, or the id of a batch.
        output: Where the answers go; None puts them beside the file.
        window: How long it may take.
        url: Where the server's API begins; None means this user's server on this machine.
        api_key: Sent with each request.
    """
    console = Console(stderr=True, highlight=False)
    begun: list[str] = []
    try:
        client = ChatClient(url or url_of_own(own_servers(os.environ)), api_key)
        target = output or Path(file).with_suffix(".output.jsonl")
        given = file if file.startswith(ID_PREFIX) and not Path(file).exists() else Path(file)
        return asyncio.run(_run(BatchClient(client), given, target, window, console, begun.append))
    except KeyboardInterrupt:
        if begun:
            console.print(f"{begun[0]} goes on; to wait for it: raystream batch {begun[0]}")
        return INTERRUPTED
    except ChatError as error:
        sys.stderr.write(f"Error: {harmless(str(error))}\n")
    except OSError as error:
        sys.stderr.write(f"Error: {error.filename}: {error.strerror}\n")
    if begun:
        console.print(f"to have the results of {begun[0]}: raystream batch {begun[0]}")
    return 1


async def _run(
    client: BatchClient,
    given: Path | str,
    output: Path,
    window: str,
    console: Console,
    on_begun: Callable[[str], None],
) -> int:
    """Run a file, or the batch of an id, to its end, and write its files.

    Raises:
        ChatError: The server refuses it, or can't be asked.
        OSError: A file can't be read or written.
    """
    if isinstance(given, str):
        batch = await client.find(given)
    else:
        endpoint = _endpoint(given)
        batch = await client.create(await client.upload(given), endpoint, window)
    on_begun(batch.id)
    batch = await _wait(client, batch, console)
    files = {output: batch.output_file_id, _errors_beside(output): batch.error_file_id}
    for path, file_id in files.items():
        if file_id is not None:
            await _until_answered(partial(_download, client, file_id, path), console)
    console.print(
        f"{batch.id} is {batch.status}: {batch.completed} answers, {batch.failed} errors"
        + (f" ({harmless(batch.fault)})" if batch.fault else "")
    )
    for path, file_id in files.items():
        if file_id is not None:
            console.print(f"{path} is written")
    return 0 if batch.status == "completed" and not batch.failed else 1


async def _wait(client: BatchClient, batch: BatchState, console: Console) -> BatchState:
    """Show how far a batch is until it has ended; return its last state."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} errors"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(batch.status, total=None, failed=0)
        while True:
            progress.update(
                task,
                description=batch.status,
                total=batch.total or None,
                completed=batch.completed + batch.failed,
                failed=batch.failed,
            )
            if batch.has_ended:
                return batch
            await asyncio.sleep(POLL_S)
            batch = await _until_answered(partial(client.find, batch.id), progress.console)


async def _download(client: BatchClient, file_id: str, path: Path) -> None:
    """Write a file beside its place, and put it there once it is whole.

    Raises:
        ChatError: The server refuses it, or can't be asked.
        OSError: The file can't be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as written:
            async for piece in client.contents(file_id):
                written.write(piece)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


async def _until_answered(ask: Callable[[], Awaitable[T]], console: Console) -> T:
    """Ask a server until it answers, waiting longer each time: it may be deployed again.

    Raises:
        ChatError: It refuses the request, or has not answered for `GIVE_UP_S`.
        OSError: See `ask`.
    """
    loop = asyncio.get_running_loop()
    give_up_s, wait_s = loop.time() + GIVE_UP_S, POLL_S
    while True:
        try:
            return await ask()
        except UnavailableError as error:
            if loop.time() + wait_s > give_up_s:
                raise
            console.print(f"{harmless(str(error))}; asked again in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def _endpoint(file: Path) -> str:
    """Return the route that the first line of a file asks, which is that of the batch.

    Raises:
        ChatError: There is no such line.
        OSError: The file can't be read.
    """
    with file.open("rb") as lines:
        for line in lines:
            if not line.isspace():
                try:
                    return str(json.loads(line)["url"])
                except (ValueError, TypeError, KeyError):
                    break
    raise ChatError(
        f'the first line of {file} is no request such as {{"url": "/v1/responses", ...}}'
    )


def _errors_beside(output: Path) -> Path:
    name = output.name.removesuffix(".jsonl").removesuffix(".output")
    return output.with_name(f"{name}.errors.jsonl")
