"""Runs the steps of a client's script and says how each one ended.

The scripts run in the environment of their client, by path: `python use_litellm.py BASE_URL`, where
the address is the recorder's. This module needs nothing but the standard library.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin
from urllib.request import urlopen

BASE_URL = sys.argv[1]
MODEL = "pydoc-chat"
LONG = "long"
"""Takes the long prompts of agents, whose answers need not make sense."""

QUESTION = "What does os.path.join do?"
ANSWER = "Join two or more pathname components"
TOO_LONG = f"{QUESTION} " * 400

RED_SQUARE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX/////AADrWueTAAAAHElEQVR4"
    "2mNgoCfg//////8fDEww/iiDpgw6AABsBwVUU97Q2gAAAABJRU5ErkJggg=="
)
"""A picture of 64 by 64 pixels."""


def _failure(step: Callable[[], Any]) -> str | None:
    """Run a step, a coroutine in an event loop of its own; return its traceback, if any."""
    # The recorder writes the step's name to each request.
    urlopen(urljoin(BASE_URL, f"/step/{step.__name__}"), data=b"").close()
    try:
        if inspect.iscoroutinefunction(step):
            asyncio.run(step())
        else:
            step()
    except Exception:  # whatever a client raises is the step's result
        return traceback.format_exc()
    return None


def _is_step(value: object) -> bool:
    """Whether this is a public function of the script that takes nothing and returns nothing."""
    if not inspect.isfunction(value) or value.__module__ != "__main__":
        return False
    signature = inspect.signature(value)
    is_public = not value.__name__.startswith("_")
    return is_public and not signature.parameters and signature.return_annotation is None


def run(script: dict[str, Any]) -> None:
    """Run a script's steps in their order, given all of its names.

    Print each one's traceback, or null, as the last line of the output.
    """
    steps = [value for value in script.values() if _is_step(value)]
    failures = {step.__name__: _failure(step) for step in steps}
    sys.stdout.write("\n" + json.dumps(failures) + "\n")


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Fail unless the client raises this error, whose classes, code or message say these words."""
    try:
        yield
    except error as raised:
        told = f"{type(raised).__mro__} {getattr(raised, 'code', None)} {raised}"
        assert all(word.lower() in told.lower() for word in words), told
        return
    raise AssertionError("the client got an answer")
