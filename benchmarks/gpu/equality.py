"""Checks that the engine's greedy tokens equal those of `model.generate`."""

from dataclasses import replace

import torch

from benchmarks.gpu.shapes import TINY, BenchmarkModel, Shape, build, stock
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest

NUM_SEQS = 24
NUM_TOKENS = 32


def num_equal(
    device: torch.device,
    dtype: torch.dtype,
    shape: Shape = TINY,
    *,
    max_batched_tokens: int = 128,
    cuda_graphs: bool = True,
) -> tuple[int, int]:
    """Return how many sequences are equal, and how many were compared.

    In float32 all must be equal. In bfloat16 some may differ, since the kernels round differently.
    Half of the prompts begin as another does, so that they take its keys and values.

    Args:
        device: Where both run.
        dtype: Dtype of the weights.
        shape: The model.
        max_batched_tokens: The most tokens of a step; longer prompts are cut into chunks.
        cuda_graphs: Whether decode steps are captured.
    """
    loaded = build(replace(shape, dtype=dtype), device)
    vocab_size = loaded.text_config.vocab_size
    # Many lengths, and more prompts than may run, so that sequences come and go.
    prompts = [
        [2 + (37 * i + 11 * j) % (vocab_size - 2) for j in range(3 + 13 * i)]
        for i in range(NUM_SEQS)
    ]
    for i in range(NUM_SEQS // 2, NUM_SEQS, 2):
        prompts[i][: len(prompts[i - 1]) // 2] = prompts[i - 1][: len(prompts[i - 1]) // 2]
    limits = EngineLimits(NUM_SEQS // 2, 512, max_batched_tokens, cuda_graphs=cuda_graphs)
    found = _engine_answers(loaded, prompts, limits)
    expected = [_stock_answer(loaded, prompt) for prompt in prompts]
    return sum(a == b for a, b in zip(found, expected, strict=True)), NUM_SEQS


def _engine_answers(
    loaded: LoadedModel, prompts: list[list[int]], limits: EngineLimits
) -> list[list[int]]:
    engine = Engine(loaded, limits)
    engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(SequenceRequest(str(i), tuple(prompt), params))
    while engine.has_work:
        for name, delta in engine.step():
            answers[int(name)] += delta.token_ids
    return answers


@torch.inference_mode()
def _stock_answer(loaded: BenchmarkModel, prompt: list[int]) -> list[int]:
    input_ids = torch.tensor([prompt], device=loaded.model.device)
    with stock(loaded) as model:
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
