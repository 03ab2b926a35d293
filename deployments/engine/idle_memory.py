"""Gives the memory of KV blocks that nothing holds back to the operating system, after a while.

Only where pages come with the first write to them: on a CPU. A block that a running sequence or a
retained prefix holds is never given back, so no key or value that may be read again is lost.

A page that is given back has to be added and cleared again for the next sequence. So blocks stay
for a while, and under a steady load none is given back. A part goes at a time, between two steps,
so that no step waits for long.
"""

import time
from collections.abc import Callable
from typing import Final

from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.scheduling.kv_extents import KVExtents
from deployments.engine.scheduling.prefixes import Holder

KEPT_S: Final = 10.0
"""Seconds that a free block keeps its memory, at least; jemalloc's decay takes as long.

Source: opt.dirty_decay_ms in https://jemalloc.net/jemalloc.3.html
"""

BYTES_AT_ONCE: Final = 2**24
"""What is given back between two steps, or one block if that is more. 16 MiB took 4 ms on two cores
of a virtual machine; a block is as large only if a step reads gigabytes of weights."""


class IdleMemory:
    """The memory of free KV blocks, and when it is given back."""

    def __init__(
        self, kv: KVCache, extents: KVExtents[Holder], now: Callable[[], float] = time.monotonic
    ) -> None:
        """Give nothing back yet.

        Args:
            kv: Holds the memory.
            extents: Says which blocks are held.
            now: The time in seconds.
        """
        self._kv = kv
        self._pools = extents.pools
        self._now = now
        self._next_s = now() + KEPT_S
        token_bytes = kv.shape.group_token_bytes(kv.max_model_len)
        self._most = [
            max(1, BYTES_AT_ONCE // (size * kv.layout.block_size)) for size in token_bytes
        ]

    def give_back(self) -> float | None:
        """Give a part back, if blocks have been free for long enough. Call it between two steps.

        Returns:
            Seconds after which to call it again even if no step has run; None if there will be
            nothing to give back then.
        """
        if not self._kv.can_give_back:
            return None
        left_s = self._next_s - self._now()
        if left_s <= 0:
            for pool in self._pools:
                pool.age()
            self._next_s = self._now() + KEPT_S
        for group, (pool, most) in enumerate(zip(self._pools, self._most, strict=True)):
            blocks = pool.take_idle(most)
            if blocks is not None:
                self._kv.give_back(group, blocks)
                break
        if any(pool.has_idle for pool in self._pools):
            return 0.0
        # Before the time is up, a step may have freed blocks that are not counted as free yet.
        if left_s > 0 or any(pool.has_aged for pool in self._pools):
            return max(0.0, self._next_s - self._now())
        return None
