"""The floors of steps: the time to read what they must read, and to compute what they must compute.

A decode step reads every weight once, whatever the number of sequences, and each sequence's keys
and values. With few sequences, the arithmetic takes far less time. With a prompt's hundreds of
tokens, the arithmetic takes more.
"""

import time

import torch

from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.model.loader import LoadedModel
from deployments.plan.model_shape import ModelShape

REPEATS = 10


def read_bandwidth(device: torch.device) -> float:
    """Measure how fast the device reads its memory, in bytes per second: the best of 5 rounds."""
    num_bytes = 2**31 if device.type == "cuda" else 2**26
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    numbers.sum().item()  # warm
    return max(_bandwidth_of_a_round(numbers) for _ in range(5))


def _bandwidth_of_a_round(numbers: torch.Tensor) -> float:
    started = time.perf_counter()
    sums = [numbers.sum() for _ in range(REPEATS)]
    sums[-1].item()  # waits for all of them
    return REPEATS * numbers.nbytes / (time.perf_counter() - started)


def step_bytes(loaded: LoadedModel, num_seqs: int, num_tokens: float) -> float:
    """Return the bytes that a decode step reads.

    Args:
        loaded: The model.
        num_seqs: Sequences of the step.
        num_tokens: Tokens that each sequence holds, on average.
    """
    config = loaded.text_config
    num_bytes = loaded.num_weight_bytes
    if not config.tie_word_embeddings:
        # Only the rows of a few tokens are read from an untied embedding table.
        table = loaded.model.get_input_embeddings().weight
        assert isinstance(table, torch.Tensor)
        num_bytes -= table.nbytes
    shape = KVShape.of(config, loaded.model.dtype)
    return num_bytes + num_seqs * num_tokens * len(shape.windows) * shape.bytes_per_layer_token


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure how fast the device multiplies matrices, in FLOPs a second: the best of 5 rounds."""
    size = 8192 if device.type == "cuda" else 128
    one, other = (torch.ones(size, size, dtype=dtype, device=device).uniform_(-1) for _ in range(2))
    (one @ other)[0, 0].item()  # warm

    def rate() -> float:
        started = time.perf_counter()
        products = [one @ other for _ in range(REPEATS)]
        products[-1][0, 0].item()  # waits for all of them
        return REPEATS * 2 * size**3 / (time.perf_counter() - started)

    return max(rate() for _ in range(5))


def prompt_flops(loaded: LoadedModel, num_tokens: int) -> float:
    """Return the FLOPs that a prompt takes, those of its logits left out."""
    shape = ModelShape.of(loaded.model.config)
    products = 2 * shape.weights.linear * num_tokens
    # Scores and their sums, of half of all pairs of tokens.
    attention = 2 * num_tokens**2 * shape.num_heads * shape.head_dim * shape.num_layers
    return products + attention
