"""Chooses tokens in vLLM with the embedded engine's sampler (model runner V1).

vLLM's own draws on V1 come from a generator that starts over when a sequence moves, and its
penalties would count the delivered tokens as prompt. `Draws` hands each row that asks for it to
`deployments.engine.sampling.sampler`, whose draw depends only on (seed, position), and bars all
tokens but the chosen one. vLLM is told temperature 0 for these rows, so it takes that token. Greedy
rows without penalties stay vLLM's.

vLLM's order on V1 is: the grammar's mask, the reported log-probabilities, `min_tokens`, this
processor, argmax. So log-probabilities stay the model's, apart from the mask.

It runs in vLLM's worker, and raises only if the device is lost: any other exception would end all
sequences. A row from which nothing can be chosen fails its own sequence, see `failures`: its logits
hold NaN, or the draw raised. vLLM's own count of NaN would take 14 times as long on a CPU.

Source: vllm/v1/sample/sampler.py and vllm/v1/sample/logits_processor/interface.py of vLLM 0.32.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample import sampler
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from deployments.compute.bisection import Bisection
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import sample
from deployments.engine.scheduling.token_counts import TokenCounts
from deployments.vllm_engine.failures import report
from deployments.vllm_engine.moves import KEY

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

logger = logging.getLogger(__name__)


class Draws(LogitsProcessor):
    """Chooses and checks the tokens of the requests whose `extra_args` come from `moves.asked`."""

    @classmethod
    def validate_params(cls, sampling_params: "VllmParams") -> None:
        """Refuse a request for which no row can be made; vLLM calls it in the replica.

        Raises:
            ValueError: What `moves.asked` returned was changed.
        """
        try:
            _Row.of(sampling_params, [0], [])
        except (KeyError, TypeError) as error:
            raise ValueError(f"extra_args[{KEY!r}]: {error!r}") from error

    def __init__(
        self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool
    ) -> None:
        """Start with no rows."""
        # vLLM compiles this small function when the first request asks for log-probabilities: for 7
        # to 43 seconds every stream stands, and without a C++ compiler the engine ends. As it is
        # written, it takes microseconds. This is the first code of ours in the worker.
        sampler.batched_count_greater_than = _count_at_least
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: so vLLM applies it to greedy rows, too, and before its argmax."""
        return False

    def update_state(self, batch_update: "BatchUpdate | None") -> None:
        """Follow the batch: which request has which row of the logits."""
        process_dict_updates(self._rows, batch_update, _Row.of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token to each row that asks, in place.

        Args:
            logits: [batch, vocab], float32, on the model's device.

        Raises:
            torch.AcceleratorError: The device is lost.
        """
        if not self._rows:
            return logits
        chosen = self._choose(logits)
        failed = self._bad_rows_of_vllm(logits) | self._drawn() - chosen.keys()
        for at in failed:
            self._rows[at].fail()
        # A failed row gets any token: the scheduler drops it.
        changed = dict.fromkeys(failed, 0) | chosen
        if not changed:
            return logits  # vLLM chooses all of them
        rows = torch.tensor(list(changed), dtype=torch.int64, device=logits.device)
        token_ids = torch.tensor(list(changed.values()), dtype=torch.int64, device=logits.device)
        logits[rows] = -torch.inf
        logits[rows, token_ids] = 0.0
        return logits

    def _drawn(self) -> set[int]:
        return {at for at, row in self._rows.items() if row.is_drawn}

    def _choose(self, logits: torch.Tensor) -> dict[int, int]:
        """Return the token of each row that is drawn, by its index; nothing for one that fails."""
        batches: Bisection[int, list[int | None]] = Bisection(
            "a draw", lambda places: self._sample(logits, places)
        )
        batches.run(sorted(self._drawn()))
        return {
            at: token_id
            for places, token_ids in batches.ran
            for at, token_id in zip(places, token_ids, strict=True)
            if token_id is not None
        }

    def _bad_rows_of_vllm(self, logits: torch.Tensor) -> set[int]:
        """Return the rows that are vLLM's to choose, and hold NaN."""
        theirs = self._rows.keys() - self._drawn()
        if not theirs:
            return set()
        is_nan = logits.amax(dim=-1).isnan().tolist()  # a maximum with NaN is NaN
        return {at for at in theirs if is_nan[at]}

    def _sample(self, logits: torch.Tensor, places: tuple[int, ...]) -> list[int | None]:
        rows = [self._rows[at].for_sampler() for at in places]
        if len(places) < len(logits) or places != tuple(range(len(places))):
            logits = logits.index_select(0, torch.tensor(places, device=logits.device))
        return [None if one is None else one.token_id for one in sample(logits, rows)]


class _Row:
    """How the tokens of one request are chosen.

    Its penalties count tokens as they come: `output` is the runner's own list, and grows.
    """

    __slots__ = ("_asked", "_counts", "_num_counted", "_output", "_params", "_prompt")

    def __init__(
        self, asked: dict[str, Any], prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> None:
        """Take what `moves.asked` returned, and the tokens as vLLM divides them."""
        fields = asked["params"] or {"logit_bias": ()}
        biases = tuple((token_id, bias) for token_id, bias in fields["logit_bias"])
        self._params = SamplingParams(**{**fields, "logit_bias": biases})
        self._asked = asked
        self._prompt, self._output = prompt_token_ids, output_token_ids
        self._num_counted = 0
        self._counts: TokenCounts | None = None
        if self._params.has_penalties:
            num_prompt = len(prompt_token_ids) - asked["num_given"]
            counted = prompt_token_ids[:num_prompt] if self._params.repetition_penalty != 1 else ()
            self._counts = TokenCounts(counted, prompt_token_ids[num_prompt:])

    @classmethod
    def of(
        cls, params: "VllmParams", prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> "_Row | None":
        """Return a request's row; None if it is not one of ours."""
        asked = (params.extra_args or {}).get(KEY)
        return None if asked is None else cls(asked, prompt_token_ids or [], output_token_ids)

    @property
    def is_drawn(self) -> bool:
        """Whether its tokens are chosen here; vLLM chooses the others."""
        return self._asked["params"] is not None

    def for_sampler(self) -> SamplingRow:
        """Return how to choose the next token."""
        if self._counts is not None:
            for token_id in self._output[self._num_counted :]:
                self._counts.add(token_id)
            self._num_counted = len(self._output)
        return SamplingRow(self._params, len(self._prompt) + len(self._output), self._counts)

    def fail(self) -> None:
        """Have the scheduler end the request."""
        request_id = self._asked["request_id"]
        try:
            report(self._asked["failures"], request_id)
        except OSError:
            logger.warning("%s could not be ended", request_id, exc_info=True)


def _count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return how many numbers of each row are at least the row's value: the value's rank.

    Source: vllm/v1/sample/ops/logprobs.py of vLLM 0.32.

    Args:
        x: [rows, n].
        values: [rows, 1].

    Returns:
        [rows], int64.
    """
    return (x >= values).sum(-1)
