"""Measures steps that prefill prompts while sequences decode."""

import statistics
import threading
import time
from collections.abc import Sequence

import torch

from benchmarks.gpu.rates import step
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest

NUM_STEPS = 7
"""Steps of one kind; their median counts."""


HOLD_S = 0.002
"""How long a busy thread holds Python's lock, and then waits."""


class MixedEngine:
    """An engine in which sequences decode for as long as it is measured."""

    def __init__(
        self,
        loaded: LoadedModel,
        num_decode: int,
        length: int,
        prompts: Sequence[tuple[int, int]] = ((1, 0),),
    ) -> None:
        """Prefill the sequences.

        Args:
            loaded: The model.
            num_decode: The sequences.
            length: The tokens of each.
            prompts: How many prompts are prefilled in a step beside them, and the tokens of each.
        """
        self._vocab_size: int = loaded.text_config.vocab_size
        self._num_decode = num_decode
        self._num_added = 0
        limits = EngineLimits(
            num_decode + max(number for number, _ in prompts),
            max(2 * length, 1 + max(each for _, each in prompts)),
            num_decode + max(length, *(number * each for number, each in prompts)),
            prefix_caching=False,
        )
        self.engine = Engine(loaded, limits)
        self.engine.warm_up()
        for _ in range(num_decode):
            self._add(length, length)
        while self.engine.stats.num_waiting or self.engine.stats.num_running < num_decode:
            step(self.engine)

    def _add(self, num_prompt_tokens: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(self._num_added)
        size = (num_prompt_tokens,)
        prompt = torch.randint(2, self._vocab_size, size, generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.engine.add(SequenceRequest(str(self._num_added), tuple(prompt), params))
        self._num_added += 1

    def seconds(self, num_prompts: int, prompt_length: int) -> float:
        """Return the median time of steps that prefill such prompts; 0 of them: decode only."""
        seconds = []
        for _ in range(NUM_STEPS):
            step(self.engine)
            step(self.engine)
            for _ in range(num_prompts):
                self._add(prompt_length, 1)
            seconds.append(step(self.engine))
        return statistics.median(seconds)


def busy_loop(stop: threading.Event) -> None:
    """Hold Python's lock half of the time until told to stop, as an event loop under load does."""
    while not stop.wait(HOLD_S):
        until = time.monotonic() + HOLD_S
        while time.monotonic() < until:
            pass
