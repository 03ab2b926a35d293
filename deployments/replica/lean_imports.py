"""Imports the modules of a replica, without what costs a start time and memory for nothing.

Python's garbage collector: modules make hundreds of thousands of objects, and they stay. It would
look through all of them again and again while they are made, and once more for each full collection
of the warm-up: a fifth of the CPU time of a start.

torch's compiler and its sharded tensors: transformers imports both to decorate functions and to
compare types, which is of use to those who compile or train.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from deployments.replica import own_actor


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import while the collector rests, and leave torch's compiler and sharded tensors out.

    Only an actor of Ray does so: it is alone in its process. In a program that holds an engine,
    others compile, train, or rely on the collector.
    """
    if not own_actor.is_actor():
        yield
        return
    with _uncollected():
        from deployments.replica.unused_compiler import leave_compiler_out

        leave_compiler_out()
        _leave_shards_out()
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the collector off meanwhile, and what is there at the end out of later collections.

    Source: https://docs.python.org/3/library/gc.html#gc.freeze
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _leave_shards_out() -> None:
    """Let transformers find a torch without `torch.distributed`; it remembers that for good."""
    import torch.distributed
    from transformers.utils.import_utils import is_torch_distributed_available

    with patch.object(torch.distributed, "is_available", lambda: False):
        is_torch_distributed_available()
