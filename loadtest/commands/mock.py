"""`loadtest mock`: a server with known timing and every fault."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from pydantic import ValidationError

from loadtest.commands.usage import mistakes_of, refuse
from loadtest.load.stop import Stop
from loadtest.mock.script import Behaviour, Fault, Framing, Script
from loadtest.mock.server import MockServer, serve_until


def mock(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8001,
    headers_ms: Annotated[float, typer.Option(help="Time from the request to the headers.")] = 0,
    first_token_ms: Annotated[
        float, typer.Option(help="Time from the request to the first text.")
    ] = 50,
    gap_ms: Annotated[float, typer.Option(help="Time between texts.")] = 10,
    tail_ms: Annotated[float, typer.Option(help="Time from the last text to the end.")] = 0,
    num_events: Annotated[int, typer.Option("--events", help="Texts per answer.")] = 32,
    tokens_per_event: Annotated[int, typer.Option(help="Tokens per text.")] = 1,
    tells_usage: Annotated[bool, typer.Option("--usage/--no-usage", help="Send usage.")] = True,
    fault: Annotated[Fault | None, typer.Option(help="How answers fail.")] = None,
    fault_after: Annotated[int, typer.Option(help="Texts before the fault.")] = 0,
    framing: Annotated[Framing, typer.Option(help="How events are written.")] = Framing.LF,
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A YAML or JSON list of behaviours, each for its `times` requests. Keys are these "
            "flags (num_events, tells_usage) with underscores; the flags are then ignored.",
        ),
    ] = None,
) -> None:
    """Run a server with known timing and faults: chat, completions, generation, classification."""
    flags = {
        "headers_ms": headers_ms,
        "first_token_ms": first_token_ms,
        "gap_ms": gap_ms,
        "tail_ms": tail_ms,
        "num_events": num_events,
        "tokens_per_event": tokens_per_event,
        "tells_usage": tells_usage,
        "fault": fault,
        "fault_after": fault_after,
        "framing": framing,
    }
    try:
        if script is None:
            behaviours = Script(Behaviour.model_validate(flags))
        else:
            behaviours = Script.from_file(script)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(MockServer(behaviours), host, port))
    except ValidationError as error:
        refuse(*mistakes_of(error))
    except (OSError, ValueError) as error:
        refuse(str(error))


async def _serve(server: MockServer, host: str, port: int) -> None:
    stop = Stop()
    with stop.on_signals():
        await serve_until(stop.draining, server, host, port, typer.echo)
