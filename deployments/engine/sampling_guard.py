"""Sampling a step's logits so that a failure hits as few sequences as possible."""

from dataclasses import dataclass

from deployments.engine.device_errors import release_cache
from deployments.engine.host_copy import take_rows
from deployments.engine.isolation import Isolation
from deployments.engine.model_runner import StepLogits
from deployments.engine.sampler import Sampled, sample
from deployments.engine.sampling_row import SamplingRow
from deployments.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawing:
    """What was drawn from a step's logits.

    Attributes:
        drawn: Each sequence's next token; None where none can be chosen.
        failed: Sequences whose sampling raised, and whether that was for want of memory.
    """

    drawn: list[tuple[Sequence, Sampled | None]]
    failed: list[tuple[Sequence, bool]]


def draw(due: StepLogits) -> Drawing:
    """Choose the next token of each sequence that is due.

    Raises:
        torch.AcceleratorError: The device is gone; no sequence is to blame.
    """
    logits, sequences = due.logits, due.sequences

    def draw_part(part: tuple[int, ...]) -> list[Sampled | None]:
        is_whole = len(part) == len(sequences)
        rows = [SamplingRow.of(sequences[i]) for i in part]
        return sample(logits if is_whole else take_rows(logits, part), rows)

    isolation = Isolation("sampling", draw_part)
    isolation.run(range(len(sequences)))
    if any(blame.is_out_of_memory for blame in isolation.blamed):
        release_cache(logits.device)
    return Drawing(
        [
            (sequences[i], sampled)
            for part, drawn in isolation.ran
            for i, sampled in zip(part, drawn, strict=True)
        ],
        [(sequences[blame.item], blame.is_out_of_memory) for blame in isolation.blamed],
    )
