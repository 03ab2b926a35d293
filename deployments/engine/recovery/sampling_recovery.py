"""Samples a step's logits so that a failure ends as few sequences as possible."""

from dataclasses import dataclass

from deployments.compute.bisection import Bisection
from deployments.compute.device_errors import release_cache
from deployments.compute.host_to_device import take_rows
from deployments.engine.model.runner import StepLogits
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import Sampled, sample
from deployments.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The tokens sampled from a step's logits.

    Attributes:
        sampled: Each sequence with its next token; None if no token can be chosen.
        failed: Sequences whose sampling raised, each with whether it ran out of memory.
    """

    sampled: list[tuple[Sequence, Sampled | None]]
    failed: list[tuple[Sequence, bool]]


def sample_step(step_logits: StepLogits, counts: DeviceCounts | None = None) -> SampledStep:
    """Sample the next token of each sequence in `step_logits`.

    Args:
        step_logits: The logits.
        counts: Keeps the counts of tokens on the logits' device; None sends them in each step.

    Raises:
        torch.AcceleratorError: The device is unusable; no sequence caused it.
    """
    logits, sequences = step_logits.logits, step_logits.sequences

    def sample_part(part: tuple[int, ...]) -> list[Sampled | None]:
        is_whole = len(part) == len(sequences)
        rows = [SamplingRow.of(sequences[i]) for i in part]
        return sample(logits if is_whole else take_rows(logits, part), rows, counts)

    bisection = Bisection("sampling", sample_part)
    bisection.run(range(len(sequences)))
    if any(failure.is_out_of_memory for failure in bisection.failures):
        release_cache(logits.device)
    return SampledStep(
        [
            (sequences[i], token)
            for part, tokens in bisection.ran
            for i, token in zip(part, tokens, strict=True)
        ],
        [(sequences[failure.item], failure.is_out_of_memory) for failure in bisection.failures],
    )
