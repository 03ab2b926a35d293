"""Measures a prompt with an image, with Gemma 3 12B's shape."""

import time
from dataclasses import replace
from typing import Any

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from benchmarks.gpu.rates import step
from benchmarks.gpu.shapes import GEMMA3_12B, SPECIAL_TOKENS, TINY_GEMMA3, Shape
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape

IMAGE_TOKEN_ID = 300

SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
"""Source: config.json of google/gemma-3-12b-it."""

TINY_SIGLIP = {**SIGLIP, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
               "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip


def shape_with_images(*, is_tiny: bool) -> Shape:
    """Return Gemma 3 12B's shape with its vision tower, or a tiny one."""
    text = TINY_GEMMA3 if is_tiny else GEMMA3_12B
    options = {
        "text_config": {**text.options, **SPECIAL_TOKENS},
        "vision_config": TINY_SIGLIP if is_tiny else SIGLIP,
        "mm_tokens_per_image": 4 if is_tiny else 256,
        "image_token_index": IMAGE_TOKEN_ID,
    }
    return replace(
        text,
        name=f"{text.name}, with images",
        options=options,
        config=Gemma3Config,
        model=Gemma3ForConditionalGeneration,
    )


def image_prompt(loaded: LoadedModel, shape: Shape, num_text_tokens: int) -> dict[str, Any]:
    """Return what a prompt with one image takes, beside its plan.

    Args:
        loaded: The model.
        shape: Its shape.
        num_text_tokens: Tokens of the prompt besides the image's.
    """
    device = loaded.model.device
    num_image_tokens, side = shape.options["mm_tokens_per_image"], loaded.model.config.vision_config
    num_tokens = num_text_tokens + num_image_tokens
    prompt = [2 + i % 200 for i in range(num_text_tokens)]
    prompt[num_text_tokens // 2 : num_text_tokens // 2] = [IMAGE_TOKEN_ID] * num_image_tokens
    types = torch.tensor([[int(token_id == IMAGE_TOKEN_ID) for token_id in prompt]])
    inputs = {
        "pixel_values": torch.rand(1, 3, side.image_size, side.image_size),
        "token_type_ids": types,
    }
    limits = EngineLimits(4, max(1024, 2 * num_tokens), 2048, prefix_caching=False)
    engine = Engine(loaded, limits)
    engine.warm_up()
    before = _peak(device, reset=True)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    seconds = []
    for i in range(3):
        engine.add(SequenceRequest(str(i), tuple(prompt), params, model_inputs=inputs))
        started = time.perf_counter()
        step(engine)
        seconds.append(time.perf_counter() - started)
        decoded = [step(engine) for _ in range(8)]
        while engine.has_work:
            step(engine)
    dtype = str(shape.dtype).removeprefix("torch.")
    planned = memory_demand(
        ModelShape.of(loaded.model.config),
        weight_bytes=0,
        dtype=dtype,
        step_dtype=dtype,
        max_model_len=num_tokens,
        max_num_seqs=1,
        max_batched_tokens=num_tokens,
        on_gpu=device.type == "cuda",
    ).activation_bytes
    return {
        "model": shape.name,
        "prompt": f"{num_text_tokens} tokens and an image of {num_image_tokens}",
        "prefill, ms": round(1000 * min(seconds[1:]), 2),
        "decode step, ms": round(1000 * min(decoded), 2),
        "step planned, MiB": planned >> 20,
        "step allocated, MiB": (_peak(device) - before) >> 20,
    }


def _peak(device: torch.device, *, reset: bool = False) -> int:
    """Return the most that was allocated, or what is allocated now; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()
