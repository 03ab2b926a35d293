"""Requests for an engine, and a collector of their deltas."""

from collections.abc import Iterable, Sequence
from random import Random

import torch

from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.tiny_models import (
    EOS_TOKEN_ID,
    IMAGE_SIZE,
    IMAGE_TOKEN_ID,
    PATCH_SIZE,
    TOKENS_PER_IMAGE,
    VOCAB_SIZE,
    load,
    make_engine,
    qwen2,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)


class Collector:
    """Steps an engine and keeps each sequence's deltas; checks the invariants when it is idle.

    If it tells later, the engine hands most deltas over while the next step runs, as on a GPU.
    """

    def __init__(self, engine: Engine, *, tells_later: bool = False) -> None:
        self.engine = engine
        self.deltas: dict[str, list[TextDelta]] = {}
        if tells_later:
            engine._runs_by_itself, engine.deliver = True, self.take

    def take(self, deltas: Iterable[tuple[str, TextDelta]]) -> None:
        for sequence_id, delta in deltas:
            self.deltas.setdefault(sequence_id, []).append(delta)

    def step(self) -> None:
        self.take(self.engine.step())

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.check()

    def token_ids(self, sequence_id: str) -> list[int]:
        return [i for delta in self.deltas[sequence_id] for i in delta.token_ids]

    def text(self, sequence_id: str) -> str:
        return "".join(delta.text for delta in self.deltas[sequence_id])

    def finish_reason(self, sequence_id: str) -> FinishReason | None:
        return self.deltas[sequence_id][-1].finish_reason


def random_prompt(random: Random, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(44, VOCAB_SIZE) for _ in range(length))


def image_request(
    name: str, random: Random, num_images: int, params: SamplingParams = GREEDY
) -> SequenceRequest:
    """Return a prompt with images, placed as a processor would place them."""
    prompt: list[int] = []
    for _ in range(num_images):
        prompt += [*random_prompt(random, 3), 5, *[IMAGE_TOKEN_ID] * TOKENS_PER_IMAGE, 6]
    prompt += random_prompt(random, 5)
    generator = torch.Generator().manual_seed(random.randrange(1000))
    model_inputs = {
        "pixel_values": torch.randn(num_images, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        "token_type_ids": torch.tensor([[int(i == IMAGE_TOKEN_ID) for i in prompt]]),
    }
    return SequenceRequest(name, tuple(prompt), params, model_inputs=model_inputs)


def sized_image_request(
    name: str, random: Random, num_images: int, params: SamplingParams = GREEDY
) -> SequenceRequest:
    """Return a prompt with images of different sizes, as the processor of Qwen2.5-VL lays it out.

    A token of an image stands for four patches.
    """
    grids = [(1, *random.choice(((2, 2), (4, 4), (4, 6), (6, 2)))) for _ in range(num_images)]
    prompt: list[int] = []
    for _, height, width in grids:
        num_tokens = height * width // 4
        prompt += [*random_prompt(random, 3), 5, *[IMAGE_TOKEN_ID] * num_tokens, 6]
    prompt += random_prompt(random, 5)
    generator = torch.Generator().manual_seed(random.randrange(1000))
    num_patches = sum(height * width for _, height, width in grids)
    model_inputs = {
        "pixel_values": torch.randn(num_patches, 2 * 3 * PATCH_SIZE**2, generator=generator),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": torch.tensor([[int(i == IMAGE_TOKEN_ID) for i in prompt]]),
    }
    return SequenceRequest(name, tuple(prompt), params, model_inputs=model_inputs)


def run_staggered(
    engine: Engine, requests: Iterable[SequenceRequest], *, tells_later: bool = False
) -> Collector:
    """Add a request before every second step, so that it meets others in every state."""
    collector = Collector(engine, tells_later=tells_later)
    for request in requests:
        engine.add(request)
        collector.step()
        if engine.has_work:
            collector.step()
    collector.run()
    return collector


def sampled_requests(random: Random) -> list[SequenceRequest]:
    variants = [
        SamplingParams(temperature=0.7, seed=1, max_tokens=12),
        SamplingParams(temperature=1.3, seed=2, top_k=20, max_tokens=12),
        SamplingParams(temperature=1.0, seed=3, top_p=0.8, max_tokens=12),
        SamplingParams(temperature=0.9, seed=4, top_p=0.9, top_k=50, max_tokens=12),
        GREEDY,
    ]
    return [
        SequenceRequest(f"s{i}", random_prompt(random, 3 + 7 * i), params)
        for i, params in enumerate(variants)
    ]


def penalized_requests(random: Random) -> list[SequenceRequest]:
    variants = [
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, seed=1, presence_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(temperature=0.8, seed=2, repetition_penalty=1.2, min_p=0.05),
        SamplingParams(temperature=0, frequency_penalty=-1.5),
        SamplingParams(temperature=1.1, seed=3, min_tokens=11, logit_bias=((EOS_TOKEN_ID, 9.0),)),
        SamplingParams(temperature=1.0, seed=4, min_tokens=6, stop=("a", "e", "\ufffd")),
    ]
    return [
        SequenceRequest(f"s{i}", random_prompt(random, 3 + 7 * i), params)
        for i, params in enumerate(variants)
    ]


def run_one(params: SamplingParams, prompt: Sequence[int] = (60, 61, 62)) -> Collector:
    return run_staggered(make_engine(load(qwen2)), [SequenceRequest("s", tuple(prompt), params)])
