"""Keeps on the device how often each running sequence holds which tokens; penalties need that.

A step sends only what has changed since the last one: the newest token of each sequence, and all
tokens of a new one. `TokenCounts` on the host stay the truth: a sequence whose row was given to
another is sent again, and what is sent twice changes nothing.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import torch

from deployments.compute.host_to_device import send, to_device
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.scheduling.token_counts import TokenCounts
from deployments.plan.memory_budget import MAX_PENALTY_ENTRIES

MIN_WIDTH = 512
"""Distinct tokens that a row has room for at first; the width doubles when one has more."""

MIN_ROWS = 8


@dataclass(slots=True)
class _Held:
    """What the device holds of a sequence: its row, and how many tokens of its output."""

    row: int
    num_added: int


@dataclass(frozen=True, slots=True)
class _Penalized:
    """A row of logits with penalties."""

    at: int
    params: SamplingParams
    counts: TokenCounts


class DeviceCounts:
    """Distinct tokens and their counts, a row for each sequence, on a device other than the CPU.

    Not thread-safe. On a device each row takes 8 bytes a distinct token of the longest one.
    """

    def __init__(self, device: torch.device) -> None:
        """Hold nothing yet."""
        self.num_sent = 0  # how many tokens' counts were sent so far
        self._device = device
        self._held = WeakKeyDictionary[TokenCounts, _Held]()
        self._token_ids = torch.zeros(0, MIN_WIDTH, dtype=torch.int32, device=device)
        self._counts = torch.zeros_like(self._token_ids)
        # Repetition, presence and frequency penalty of each row.
        self._penalties = torch.zeros(0, 3, device=device)

    @classmethod
    def open(cls, device: torch.device) -> Self | None:
        """Return counts for a device; None on a CPU, where the sequences' own are at hand."""
        return None if device.type == "cpu" else cls(device)

    def penalize(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Apply the penalties in place; see `logit_processors`.

        Args:
            logits: [n, vocab], float32, on the device.
            rows: How to adjust each of the n rows.
        """
        penalized = [
            _Penalized(at, row.params, row.token_counts)
            for at, row in enumerate(rows)
            if row.token_counts
        ]
        if not penalized:
            return
        # Rows are padded to the longest beside them, so a long one is beside few others.
        penalized.sort(key=lambda each: len(each.counts))
        places = self._send(penalized)
        for first, end in _chunks([len(each.counts) for each in penalized]):
            self._apply(logits, penalized[first:end], places[:, first:end])

    def _apply(
        self, logits: torch.Tensor, penalized: Sequence[_Penalized], places: torch.Tensor
    ) -> None:
        """Penalize logits.

        Args:
            logits: [n, vocab].
            penalized: The m rows with penalties, which are applied at once.
            places: [3, m], int64: each one's row of logits, its row here and its distinct tokens.
        """
        of_logits, rows, lengths = places
        longest = max(len(each.counts) for each in penalized)
        token_ids, counts = (
            held[:, :longest].index_select(0, rows) for held in (self._token_ids, self._counts)
        )
        is_held = torch.arange(longest, device=self._device) < lengths[:, None]
        # Beyond its end a row repeats its first token, which is then written twice alike.
        token_ids = token_ids.where(is_held, token_ids[:, :1])
        counts = counts.where(is_held, counts[:, :1])
        repetition, presence, frequency = self._penalties.index_select(0, rows)[:, :, None].unbind(
            1
        )
        entries = of_logits[:, None], token_ids.long()
        taken = counts * frequency + (counts > 0) * presence
        logits[entries] = penalized_logits(logits[entries], repetition, taken)

    def _send(self, penalized: Sequence[_Penalized]) -> torch.Tensor:
        """Bring the device up to date; return the `places` of `_apply`."""
        self._make_room(penalized)
        known = [self._held.get(each.counts) for each in penalized]
        new = [each for each, held in zip(penalized, known, strict=True) if held is None]
        rows = iter(self._free_rows(penalized, len(new)))
        states = [_Held(next(rows), 0) if held is None else held for held in known]
        numbers = [array("q", [each.at for each in penalized])]
        numbers.append(array("q", [held.row for held in states]))
        numbers.append(array("q", [len(each.counts) for each in penalized]))
        is_new = [held is None for held in known]
        numbers += self._changes(penalized, states, is_new)
        joined = bytearray(b"".join(numbers))
        sent = send(torch.frombuffer(joined, dtype=torch.int64), self._device)
        num_places = 3 * len(penalized)
        places, changes = sent[:num_places].view(3, -1), sent[num_places:].view(3, -1)
        self._token_ids.view(-1).index_copy_(0, changes[0], changes[1].int())
        self._counts.view(-1).index_copy_(0, changes[0], changes[2].int())
        if new:
            self._send_penalties(
                new, [held.row for held, fresh in zip(states, is_new, strict=True) if fresh]
            )
        # Only now: what raised above is sent again.
        for each, held, fresh in zip(penalized, states, is_new, strict=True):
            held.num_added = len(each.counts.added)
            if fresh:
                self._held[each.counts] = held
        self.num_sent += len(numbers[-1])
        return places

    def _changes(
        self, penalized: Sequence[_Penalized], states: Sequence[_Held], is_new: Sequence[bool]
    ) -> tuple["array[int]", "array[int]", "array[int]"]:
        """Return what the device lacks: places in its flat rows, token ids and counts."""
        width = self._token_ids.shape[1]
        places, token_ids, found = array("q"), array("q"), array("q")
        for each, held, fresh in zip(penalized, states, is_new, strict=True):
            counts, first = each.counts, held.row * width
            changed = range(len(counts)) if fresh else counts.added[held.num_added :]
            for place in changed:
                places.append(first + place)
                token_ids.append(counts.token_ids[place])
                found.append(counts.output_counts[place])
        return places, token_ids, found

    def _send_penalties(self, new: Sequence[_Penalized], rows: Sequence[int]) -> None:
        values = [
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in (each.params for each in new)
        ]
        at = to_device(rows, self._device, torch.int64)
        self._penalties.index_copy_(0, at, to_device(values, self._device, torch.float32))

    def _free_rows(self, penalized: Sequence[_Penalized], num: int) -> Sequence[int]:
        """Return rows for new sequences: free ones, else those of sequences that are not here."""
        if not num:
            return ()
        free = set(range(len(self._token_ids))) - {held.row for held in self._held.values()}
        if len(free) < num:
            here = {each.counts for each in penalized}
            for counts in [counts for counts in self._held if counts not in here]:
                free.add(self._held.pop(counts).row)
        return sorted(free)[:num]

    def _make_room(self, penalized: Sequence[_Penalized]) -> None:
        """Make the rows as wide and as many as a step needs; what they hold stays."""
        num_rows, width = self._token_ids.shape
        longest = max(len(each.counts) for each in penalized)
        wanted = max(width, 1 << (longest - 1).bit_length())
        if wanted == width and len(penalized) <= num_rows:
            return
        if len(penalized) > num_rows:
            num_rows = max(MIN_ROWS, 1 << (len(penalized) - 1).bit_length())
        token_ids = torch.zeros(num_rows, wanted, dtype=torch.int32, device=self._device)
        counts, penalties = torch.zeros_like(token_ids), self._penalties.new_zeros(num_rows, 3)
        for old, new in (
            (self._token_ids, token_ids),
            (self._counts, counts),
            (self._penalties, penalties),
        ):
            new[: len(old), : old.shape[1]] = old
        self._token_ids, self._counts, self._penalties = token_ids, counts, penalties


def _chunks(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each run of rows that fit together into the plan.

    Args:
        lengths: The distinct tokens of each row, ascending.
    """
    first = 0
    for at, length in enumerate(lengths):
        if at > first and (at + 1 - first) * length > MAX_PENALTY_ENTRIES:
            yield first, at
            first = at
    yield first, len(lengths)


def penalized_logits(
    logits: torch.Tensor, repetition: torch.Tensor, taken: torch.Tensor
) -> torch.Tensor:
    """Return logits after the penalties, of shapes that fit together; see `logit_processors`."""
    return torch.where(logits > 0, logits / repetition, logits * repetition) - taken
