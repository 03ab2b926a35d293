"""What a process knows about the actor that it is, and how it ends itself.

Serve replaces an actor that has ended at once. One that fails its health checks it replaces after
three of them, and the old one then holds its device until it has stopped in order, which a process
that hangs never does.
"""

import os
import threading
from pathlib import Path

import ray
from ray.actor import exit_actor
from ray.runtime_context import get_runtime_context

EXIT_S = 1.0
"""Seconds for an orderly exit. What hangs in the device's driver may not let the process end."""


def own_actor_name() -> str | None:
    """Return the name of the actor that this process is; None if it is none."""
    return get_runtime_context().get_actor_name() if is_actor() else None


def end_own_actor() -> None:
    """End this process if it is an actor; Ray then reports no crash. Else do nothing.

    Call it in a method of the actor. It raises what makes Ray end the process.
    """
    if not is_actor():
        return
    last_resort = threading.Timer(EXIT_S, os._exit, (1,))
    last_resort.daemon = True
    last_resort.start()
    exit_actor()  # type: ignore[no-untyped-call] # Ray leaves it untyped


def is_actor() -> bool:
    """Return whether this process is an actor."""
    return ray.is_initialized() and get_runtime_context().get_actor_id() is not None


def own_log_file(replica_id: str) -> Path | None:
    """Return a file for what vLLM's processes log, beside Serve's own logs; None without Ray."""
    if not ray.is_initialized():
        return None
    return session_folder("logs", "serve") / f"vllm_{replica_id}_{os.getpid()}.log"


def session_folder(*names: str) -> Path:
    """Return a folder of this node that ends with Ray's session."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), *names)
