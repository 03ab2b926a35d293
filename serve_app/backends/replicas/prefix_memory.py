"""Where the beginnings of prompts lie: which replicas have run a prompt that begins like another.

A replica keeps the keys and values of the prompts that it has run, so a conversation's next turn
costs least where its last turn ran. Ray's controller hears of a replica's state every ten seconds,
which is too late for that; what this process itself has sent where is known at once.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import ceil
from typing import Final

from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage

MAX_NUM_PREFIXES: Final = 65_536
"""The most beginnings that are remembered, some 400 bytes each; the least recently used leave."""

MAX_NUM_HOLDERS: Final = 8
"""The most replicas that are remembered for one beginning."""

PIECE_LENGTH: Final = 512
"""Characters, or token ids, of the pieces that a prompt without messages is divided into."""

BOUND: Final = 1.25
"""A replica gets no request for its prefix if it then has more than this times the mean."""


def prefix_keys(request: GenerationRequest) -> list[int]:
    """Return a hash of each beginning of a request's prompt, the shortest first.

    A conversation has one after each message, another prompt one after each piece of it. Python
    keeps the hashes of texts and images, so that a second call costs little.
    """
    key = hash((request.adapter, request.tools, request.template_kwargs))
    keys = []
    for piece in _pieces(request.prompt):
        key = hash((key, piece))
        keys.append(key)
    return keys


def _pieces(prompt: tuple[ChatMessage, ...] | str | tuple[int, ...]) -> Iterable[Hashable]:
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], ChatMessage):
        return prompt
    ends = range(PIECE_LENGTH, len(prompt) + 1, PIECE_LENGTH)
    return (prompt[end - PIECE_LENGTH : end] for end in ends)


class PrefixMemory:
    """Which replicas have run prompts with which beginnings; callable in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: OrderedDict[int, dict[str, None]] = OrderedDict()

    def note(self, keys: Iterable[int], replica_id: str) -> None:
        """Note that a replica runs a prompt."""
        with self._lock:
            for key in keys:
                holders = self._holders.setdefault(key, {})
                self._holders.move_to_end(key)
                holders.pop(replica_id, None)
                holders[replica_id] = None  # the latest is the last
                if len(holders) > MAX_NUM_HOLDERS:
                    del holders[next(iter(holders))]
            while len(self._holders) > MAX_NUM_PREFIXES:
                self._holders.popitem(last=False)

    def forget(self, keys: Iterable[int], replica_id: str) -> None:
        """Note that a replica has refused a prompt, so that the next offer goes elsewhere."""
        with self._lock:
            for key in keys:
                self._holders.get(key, {}).pop(replica_id, None)

    def choose(self, keys: Sequence[int], loads: Mapping[str, int]) -> str | None:
        """Return the replica that has run the most of a prompt's beginning, unless it is too busy.

        Of several the least busy one is chosen. None means that any replica will do.

        Args:
            keys: The prompt's; see `prefix_keys`.
            loads: How many requests each replica has that may be chosen.
        """
        most = ceil(BOUND * (sum(loads.values()) + 1) / max(1, len(loads)))
        with self._lock:
            for key in reversed(keys):
                holders = [e for e in self._holders.get(key, ()) if loads.get(e, most) < most]
                if holders:
                    return min(holders, key=loads.__getitem__)
        return None
