"""Where the beginnings of prompts lie: which replicas have run a prompt that begins like another.

A replica keeps the keys and values of the prompts that it has run, so a conversation's next turn
costs least where its last turn ran. Ray's controller hears of a replica's state every ten seconds,
which is too late for that; what this process itself has sent where is known at once.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from typing import Final

from deployments.contract import ChatMessage, GenerationRequest, ImagePart

MAX_NUM_PREFIXES: Final = 65_536
"""The most beginnings that are remembered, some 200 bytes each; the least recently used leave."""

MAX_NUM_HOLDERS: Final = 8
"""The most replicas that are remembered for one beginning."""

PIECE_LENGTH: Final = 512
"""Characters, or token ids, of the pieces that a prompt without messages is divided into."""

BOUND: Final = 1.25
"""A replica gets no request for its prefix if it then has more than this times the mean."""


def prefix_keys(request: GenerationRequest) -> list[bytes]:
    """Return a digest of each beginning of a request's prompt, the shortest first.

    A conversation has one after each message, another prompt one after each piece of it.
    """
    digest = blake2b(repr((request.tools, request.template_kwargs)).encode(), digest_size=8)
    keys = []
    for piece in _pieces(request.prompt):
        digest.update(piece)
        keys.append(digest.digest())
    return keys


def _pieces(prompt: tuple[ChatMessage, ...] | str | tuple[int, ...]) -> Iterable[bytes]:
    if isinstance(prompt, tuple) and all(isinstance(each, ChatMessage) for each in prompt):
        return map(_bytes_of, prompt)
    starts = range(PIECE_LENGTH, len(prompt) + 1, PIECE_LENGTH)
    return (repr(prompt[start - PIECE_LENGTH : start]).encode() for start in starts)


def _bytes_of(message: object) -> bytes:
    assert isinstance(message, ChatMessage), "the prompt is a conversation"
    parts = [
        part.data if isinstance(part, ImagePart) else part.text.encode() for part in message.parts
    ]
    others = (message.role, message.tool_calls, message.name, [len(part) for part in parts])
    return b"".join((repr(others).encode(), *parts))


class PrefixMemory:
    """Which replicas have run prompts with which beginnings."""

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, dict[str, None]] = OrderedDict()

    def note(self, keys: Iterable[bytes], replica_id: str) -> None:
        """Note that a replica runs a prompt."""
        for key in keys:
            holders = self._holders.setdefault(key, {})
            self._holders.move_to_end(key)
            holders.pop(replica_id, None)
            holders[replica_id] = None  # the latest is the last
            if len(holders) > MAX_NUM_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > MAX_NUM_PREFIXES:
            self._holders.popitem(last=False)

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> str | None:
        """Return the replica that has run the most of a prompt's beginning, unless it is too busy.

        Of several the least busy one is chosen. None means that any replica will do.

        Args:
            keys: The prompt's; see `prefix_keys`.
            loads: How many requests each replica has that may be chosen.
        """
        most = ceil(BOUND * (sum(loads.values()) + 1) / max(1, len(loads)))
        for key in reversed(keys):
            holders = [each for each in self._holders.get(key, ()) if loads.get(each, most) < most]
            if holders:
                return min(holders, key=loads.__getitem__)
        return None
