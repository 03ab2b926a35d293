"""The floor of a decode step: the time to read the memory that it must read.

A decode step reads every weight once, whatever the number of sequences, and each sequence's keys
and values. With few sequences, the arithmetic takes far less time.
"""

import time

import torch

from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.model.loader import LoadedModel

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
