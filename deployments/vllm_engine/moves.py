"""How a sequence is handed to vLLM so that it goes on as if it had never moved.

vLLM has two model runners, and each needs another way:

- V1 (`VLLM_USE_V2_MODEL_RUNNER=0`, or no Triton, as in the CPU wheel) takes the delivered tokens as
  part of the prompt. Its draws and penalties would then start over, so `draws.Draws` chooses the
  tokens with the embedded engine's sampler, which only depends on (seed, position).
- V2 (GPUs) draws with noise that depends on (seed, position) already. `scheduler` appends the
  delivered tokens to the request's output, which makes a move look like a preemption. So vLLM's
  own penalties, `min_tokens` and `max_tokens` count them.

Needs no vLLM, so that it is tested without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest

KEY = "raystream"
"""Where `extra_args` of a request's parameters hold what is ours."""
SAMPLED_BY = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
"""The parameters that decide which token is chosen from given logits."""
MAX_TOP_K = 2**31 - 1
MAX_NUM_STOP_TOKEN_IDS = 120
"""Stop tokens of a request with `min_tokens` on V2. Its kernel takes 128, the model's own included,
and more would end the engine.

Source: MAX_NUM_STOP_TOKEN_IDS in vllm/v1/worker/gpu/sample/logit_bias.py of vLLM 0.32.
"""


class Runner(StrEnum):
    """vLLM's model runners; `VllmConfig.use_v2_model_runner` says which one it takes."""

    V1 = "V1"
    V2 = "V2"


@dataclass(frozen=True, slots=True)
class Handover:
    """What vLLM is given for a sequence.

    Attributes:
        prompt_token_ids: The prompt; on V1, the delivered tokens follow.
        fields: Fields of vLLM's SamplingParams: those that choose tokens or count them.
    """

    prompt_token_ids: list[int]
    fields: dict[str, Any]


def hand_over(request: SequenceRequest, runner: Runner, max_num_tokens: int) -> Handover:
    """Return what vLLM is given for a sequence, also for one that was begun elsewhere.

    vLLM takes no `max_tokens` below 1: a sequence with `max_tokens` 0 gets 1.

    Args:
        request: The sequence. `EngineLimits.check` has passed it.
        runner: The model runner that will run it.
        max_num_tokens: Most tokens of prompt and answer together, at least one more than there are
            (`EngineLimits.max_num_tokens`).
    """
    params, given = request.params, request.generated_token_ids
    prompt = list(request.prompt_token_ids)
    num_counted = len(given) if runner is Runner.V1 else 0
    max_tokens = max(1, max_num_tokens - len(prompt) - num_counted)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min(max(0, params.min_tokens - num_counted), max_tokens),
    }
    if runner is Runner.V1:
        extra_args = asked(params, len(given))
        return Handover([*prompt, *given], {**fields, "temperature": 0.0, "extra_args": extra_args})
    native = sampling(params)
    native["logit_bias"] = dict(params.logit_bias) or None
    return Handover(prompt, {**fields, **native, "extra_args": delivered(given)})


def resubmit(request: SequenceRequest, max_num_tokens: int) -> Handover:
    """Return what a server of vLLM that knows nothing of us is given for a sequence.

    The delivered tokens are part of the prompt to it. Greedy texts go on as if they had not moved.
    So do draws of runner V2, which depend on (seed, position); penalties forget those tokens.

    Args:
        request: See `hand_over`.
        max_num_tokens: See `hand_over`.
    """
    params, given = request.params, request.generated_token_ids
    prompt = [*request.prompt_token_ids, *given]
    max_tokens = max(1, max_num_tokens - len(prompt))
    fields = sampling(params)
    fields["logit_bias"] = dict(params.logit_bias) or None
    fields["max_tokens"] = max_tokens
    fields["min_tokens"] = min(max(0, params.min_tokens - len(given)), max_tokens)
    return Handover(prompt, fields)


def sampling(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that tokens are chosen by; vLLM takes no integer beyond 64 bits."""
    chosen_by = {name: getattr(params, name) for name in SAMPLED_BY}
    return {**chosen_by, "top_k": min(params.top_k, MAX_TOP_K)}


def asked(params: SamplingParams, num_given: int) -> dict[str, Any]:
    """Return V1's `extra_args`: how `Draws` chooses a sequence's tokens.

    vLLM itself gets temperature 0, no penalty, no bias and no truncation. For a greedy sequence
    without penalties and biases, its own argmax is the same choice, and faster: no `params`.

    Args:
        params: The sequence's parameters.
        num_given: How many tokens at the end of vLLM's prompt are the sequence's own output.
    """
    if not (params.temperature > 0 or params.has_penalties or params.logit_bias):
        return {KEY: {"params": None, "num_given": num_given}}
    chosen_by = sampling(params)
    chosen_by["logit_bias"] = [[token_id, bias] for token_id, bias in params.logit_bias]
    return {KEY: {"params": chosen_by, "num_given": num_given}}


def delivered(token_ids: Sequence[int]) -> dict[str, Any]:
    """Return V2's `extra_args`: the output that the sequence already has."""
    return {KEY: {"delivered": list(token_ids)}} if token_ids else {}


def unsupported(params: SamplingParams, runner: Runner) -> str | None:
    """Return what a runner of vLLM 0.32 can't do of these parameters; None if it can do all.

    V2 has penalties, biases and `min_tokens` of its own. It raises temperatures between 0 and 0.01
    to 0.01, which counts as doing it.
    """
    has_too_many_stops = len(params.stop_token_ids) > MAX_NUM_STOP_TOKEN_IDS
    if runner is Runner.V2 and params.min_tokens > 0 and has_too_many_stops:
        return f"min_tokens with more than {MAX_NUM_STOP_TOKEN_IDS} stop_token_ids"
    return None
