"""Counts that are kept on the device penalize as counts that are sent in each step do."""

import gc
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling import device_counts
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.logit_processors import adjust
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.scheduling.token_counts import TokenCounts

VOCAB_SIZE = 300
CPU = torch.device("cpu")

PARAMS = [
    SamplingParams(repetition_penalty=1.05),
    SamplingParams(repetition_penalty=1.7, presence_penalty=0.3),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(frequency_penalty=-1),
]


class Run:
    """Sequences of some tokens that grow, and the counts on their device."""

    def __init__(self, seed: int, num_seqs: int) -> None:
        self.random = Random(seed)
        self.held = DeviceCounts(CPU)
        self.generator = torch.Generator().manual_seed(seed)
        self.sequences = [self.begin() for _ in range(num_seqs)]

    def token_id(self) -> int:
        return self.random.randrange(VOCAB_SIZE)

    def begin(self) -> tuple[SamplingParams, TokenCounts]:
        prompt, output = (
            [self.token_id() for _ in range(self.random.randrange(40))] for _ in range(2)
        )
        return self.random.choice(PARAMS), TokenCounts(prompt, output)

    def is_equal(self, chosen: list[int]) -> bool:
        """Penalize the rows of some sequences both ways; return whether the results are equal."""
        rows = [SamplingRow(params, 0, counts) for params, counts in self.chosen(chosen)]
        rows.insert(self.random.randrange(len(rows) + 1), SamplingRow(SamplingParams(), 0))
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=self.generator)
        return torch.equal(adjust(logits, rows, self.held), adjust(logits, rows))

    def chosen(self, chosen: list[int]) -> list[tuple[SamplingParams, TokenCounts]]:
        return [self.sequences[i] for i in chosen]

    def step(self) -> bool:
        """Let some sequences run, in any order; some end and others begin."""
        at = self.random.sample(range(len(self.sequences)), self.random.randint(1, 6))
        if not self.is_equal(at):
            return False
        for _, counts in self.chosen(at):
            counts.add(self.token_id())
        if self.random.random() < 0.3:
            self.sequences[self.random.randrange(len(self.sequences))] = self.begin()
        return True


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_give_the_same_logits_to_the_bit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_counts, "MIN_ROWS", 2)  # so that rows are given to others
    monkeypatch.setattr(device_counts, "MIN_WIDTH", 8)
    monkeypatch.setattr(device_counts, "MAX_PENALTY_ENTRIES", 8 if seed % 2 else 120)
    run = Run(seed, num_seqs=12)
    assert all(run.step() for _ in range(60))


def test_a_step_sends_the_newest_token_of_each_sequence() -> None:
    run = Run(0, num_seqs=5)
    run.is_equal([0, 1, 2, 3, 4])
    assert run.held.num_sent == sum(len(counts) for _, counts in run.sequences)
    run.held.num_sent = 0
    for num_tokens in (1, 2, 0):
        for _, counts in run.sequences:
            for _ in range(num_tokens):
                counts.add(run.token_id())
        assert run.is_equal([4, 2, 0])
        assert run.is_equal([1, 3])
        assert run.held.num_sent == 5 * num_tokens
        run.held.num_sent = 0


class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Notes the most elements of a tensor that an operator makes, views left out."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in given:
            self.most = max(self.most, made.numel())
        return made


def test_a_long_row_does_not_widen_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_counts, "MAX_PENALTY_ENTRIES", 600)
    held, params = DeviceCounts(CPU), PARAMS[1]
    lengths = [20] * 31 + [VOCAB_SIZE] + [20] * 32
    rows = [SamplingRow(params, 0, TokenCounts(list(range(length)), [])) for length in lengths]
    logits = torch.randn(len(rows), VOCAB_SIZE)
    expected = adjust(logits.clone(), rows)
    held.penalize(logits.clone(), rows)  # sends the tokens, and makes room for them
    with Sizes() as sizes:  # type: ignore[no-untyped-call] # torch leaves it untyped
        held.penalize(logits, rows)
    assert torch.equal(logits, expected)
    assert VOCAB_SIZE <= sizes.most <= 600


def test_the_row_of_a_sequence_that_has_ended_is_used_again() -> None:
    run = Run(0, num_seqs=device_counts.MIN_ROWS)
    everyone = list(range(len(run.sequences)))
    for _ in range(3):
        assert run.is_equal(everyone)
        assert len(run.held._token_ids) == device_counts.MIN_ROWS
        run.sequences = [run.begin() for _ in everyone]
        gc.collect()


def test_what_could_not_be_sent_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(0, num_seqs=4)
    assert run.is_equal([0, 1])
    for _, counts in run.sequences:
        counts.add(run.token_id())
    with monkeypatch.context() as patched:
        patched.setattr(device_counts, "send", raising)
        with pytest.raises(torch.OutOfMemoryError):
            run.is_equal([0, 1, 2, 3])
    assert run.is_equal([0, 1, 2, 3])


def raising(*arguments: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError


def without_changes(held: DeviceCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send nothing of a sequence that is known."""
    right = held._changes

    def changes(penalized: Any, states: Any, is_new: Any) -> Any:
        new = [
            (each, own) for each, own, fresh in zip(penalized, states, is_new, strict=True) if fresh
        ]
        return right([each for each, _ in new], [own for _, own in new], [True] * len(new))

    monkeypatch.setattr(held, "_changes", changes)


def without_padding(held: DeviceCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a row held before, beyond its end."""
    right = held._apply

    def apply(logits: torch.Tensor, penalized: Any, places: torch.Tensor) -> None:
        longest = places.clone()
        longest[2] = longest[2].max()
        right(logits, penalized, longest)

    monkeypatch.setattr(held, "_apply", apply)


def without_weights(held: DeviceCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave each row the penalties of the sequence before it."""
    monkeypatch.setattr(held, "_send_penalties", lambda new, rows: None)


@pytest.mark.parametrize("break_it", [without_changes, without_padding, without_weights])
def test_a_fault_changes_the_logits(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_counts, "MIN_ROWS", 2)
    run = Run(1, num_seqs=12)
    break_it(run.held, monkeypatch)
    assert not all(run.step() for _ in range(60))
