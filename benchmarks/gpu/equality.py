"""Checks that the engine's greedy tokens equal those of `model.generate`."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.gpu.shapes import TINY, Shape, build, stock
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.support import is_multi_axis
from deployments.engine.scheduling.sequence import SequenceRequest

NUM_SEQS = 24
NUM_TOKENS = 32

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
IMAGE_GRID = (1, 4, 6)
"""Patches of an image; a token of an image stands for four."""


def num_equal(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many sequences of a tiny Qwen 2 are equal, and how many were compared."""
    return Comparison(device, dtype, TINY).num_equal()


class Comparison:
    """Compares the answers of a model.

    In float32 all must be equal. In bfloat16 some may differ, since the kernels round differently.
    Half of the prompts begin as another does, so that they take its keys and values. A model with
    several axes of positions has an image in the last prompt.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: Shape) -> None:
        """Build the model.

        Args:
            device: Where engine and `generate` run.
            dtype: Dtype of the weights.
            shape: The model.
        """
        self._loaded = build(replace(shape, dtype=dtype), device)
        self._requests = _requests(self._loaded.text_config.vocab_size)
        if is_multi_axis(self._loaded.model.config):
            self._requests[-1] = _with_image(self._requests[-1], self._loaded.model.config)

    def num_equal(
        self, *, max_batched_tokens: int = 128, cuda_graphs: bool = True
    ) -> tuple[int, int]:
        """Return how many sequences are equal, and how many were compared.

        Args:
            max_batched_tokens: The most tokens of a step; longer prompts are cut into chunks.
            cuda_graphs: Whether decode steps are captured.
        """
        limits = EngineLimits(
            max(1, len(self._requests) // 2), 512, max_batched_tokens, cuda_graphs=cuda_graphs
        )
        found = self._found(limits)
        return sum(a == b for a, b in zip(found, self._expected, strict=True)), len(found)

    def _found(self, limits: EngineLimits) -> list[list[int]]:
        engine = Engine(self._loaded, limits)
        engine.warm_up()
        answers: list[list[int]] = [[] for _ in self._requests]
        for request in self._requests:
            engine.add(request)
        while engine.has_work:
            for name, delta in engine.step():
                answers[int(name)] += delta.token_ids
        return answers

    @cached_property
    def _expected(self) -> list[list[int]]:
        return [self._stock_answer(request) for request in self._requests]

    @torch.inference_mode()
    def _stock_answer(self, request: SequenceRequest) -> list[int]:
        device = self._loaded.model.device
        input_ids = torch.tensor([request.prompt_token_ids], device=device)
        inputs = request.model_inputs or {}
        with stock(self._loaded) as model:
            output = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                **{name: tensor.to(device) for name, tensor in inputs.items()},
            )
        answer: list[int] = output[0, input_ids.shape[1] :].tolist()
        return answer


def _requests(vocab_size: int) -> list[SequenceRequest]:
    """Return prompts of many lengths, and more than may run, so that sequences come and go."""
    prompts = [
        [2 + (37 * i + 11 * j) % (vocab_size - 2) for j in range(3 + 13 * i)]
        for i in range(NUM_SEQS)
    ]
    for i in range(NUM_SEQS // 2, NUM_SEQS, 2):
        prompts[i][: len(prompts[i - 1]) // 2] = prompts[i - 1][: len(prompts[i - 1]) // 2]
    return [SequenceRequest(str(i), tuple(prompt), PARAMS) for i, prompt in enumerate(prompts)]


def _with_image(request: SequenceRequest, config: Any) -> SequenceRequest:
    """Return the request with an image after its third token, as Qwen2.5-VL's processor lays it."""
    vision, (frames, height, width) = config.vision_config, IMAGE_GRID
    num_patches = frames * height * width
    image = (config.image_token_id,) * (num_patches // vision.spatial_merge_size**2)
    text = request.prompt_token_ids
    prompt = (*text[:3], *image, *text[3:])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "pixel_values": torch.randn(num_patches, values, generator=generator),
        "image_grid_thw": torch.tensor([IMAGE_GRID]),
        "mm_token_type_ids": torch.tensor([[int(i == config.image_token_id) for i in prompt]]),
    }
    return replace(request, prompt_token_ids=prompt, model_inputs=inputs)
