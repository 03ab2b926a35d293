"""`raystream batch`: runs a file of requests, shows how far it is, and writes what came of it."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.client.batch_client import BatchClient, BatchState
from serve_app.client.chat_client import ChatClient, ChatError
from serve_app.commands.run.server_record import own_servers
from serve_app.commands.user.chat.chat import INTERRUPTED, url_of_own
from serve_app.commands.user.chat.screens import harmless

POLL_S: Final = 1.0

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
            with path.open("wb") as written:
                async for piece in client.contents(file_id):
                    written.write(piece)
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
            batch = await client.find(batch.id)


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
