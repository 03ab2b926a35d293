"""Imports the modules of a replica while Python's garbage collector rests.

Modules make hundreds of thousands of objects, and they stay. The collector would look through all
of them again and again while they are made, and once more for each full collection of the warm-up:
a fifth of the CPU time of a start.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.replica import own_actor


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Keep the collector off meanwhile, and what is there at the end out of later collections.

    Only an actor of Ray does so. Elsewhere, as in a program that holds an engine, the objects of
    others would never be collected either.

    Source: https://docs.python.org/3/library/gc.html#gc.freeze
    """
    if not (own_actor.is_actor() and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
