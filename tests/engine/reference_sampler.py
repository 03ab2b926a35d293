"""A reference for the sampler: one row, float64, each step written as its definition."""

from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log

from deployments.contract.sampling_params import SamplingParams


def logprobs(logits: Sequence[float]) -> list[float]:
    """Return the logarithm of the softmax."""
    highest = max(logits)
    total = log(sum(exp(logit - highest) for logit in logits))
    return [logit - highest - total for logit in logits]


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    barred: Sequence[int] = (),
) -> list[float]:
    """Return the logits after bars, biases and penalties."""
    values = list(logits)
    for token_id in barred:
        values[token_id] = -inf
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        if values[token_id] > 0:
            values[token_id] /= params.repetition_penalty
        else:
            values[token_id] *= params.repetition_penalty
    for token_id in set(output):
        values[token_id] -= output.count(token_id) * params.frequency_penalty
        values[token_id] -= params.presence_penalty
    return values


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Return each token's probability of being sampled from adjusted logits."""
    if params.temperature == 0:
        return [float(at == logits.index(max(logits))) for at in range(len(logits))]
    likely = _softmax([logit / params.temperature for logit in logits])
    likely = _keep(likely, [at for at, p in enumerate(likely) if p >= params.min_p * max(likely)])
    if params.top_k:
        likely = _keep(likely, _by_likelihood(logits)[: params.top_k])
    nucleus: list[int] = []
    for at in _by_likelihood(logits):
        if sum(likely[i] for i in nucleus) >= params.top_p and params.top_p < 1:
            break
        nucleus.append(at)
    return _keep(likely, nucleus)


def choose(likely: Sequence[float], number: float) -> int:
    """Return the first token at which the cumulative probability exceeds the number."""
    return next(at for at, total in enumerate(accumulate(likely)) if total > number)


def margin(logits: Sequence[float], params: SamplingParams) -> float:
    """Return a token's least distance to a bound of min_p or top_p; float32 blurs tiny ones."""
    likely = _softmax([logit / params.temperature for logit in logits])
    near = [abs(p / max(likely) - params.min_p) for p in likely if params.min_p]
    before_top_p = probabilities(
        logits,
        SamplingParams(temperature=params.temperature, min_p=params.min_p, top_k=params.top_k),
    )
    total = 0.0
    for p in sorted(before_top_p, reverse=True):
        total += p
        near += [abs(total - params.top_p)] if params.top_p < 1 else []
    return min(near, default=inf)


def _by_likelihood(logits: Sequence[float]) -> list[int]:
    """Return the token ids by falling likelihood; ties go to the lower id."""
    return sorted(range(len(logits)), key=lambda at: (-logits[at], at))


def _keep(likely: Sequence[float], token_ids: Sequence[int]) -> list[float]:
    kept = [p if at in token_ids else 0.0 for at, p in enumerate(likely)]
    return [p / sum(kept) for p in kept]


def _softmax(values: Sequence[float]) -> list[float]:
    highest = max(values)
    total = sum(exp(value - highest) for value in values)
    return [exp(value - highest) / total for value in values]
