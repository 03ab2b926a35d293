"""The least time a decode step can take: that of reading what it has to read.

A decode step reads every weight once, whatever the number of sequences, and each sequence's keys
and values. With few sequences the arithmetic on them takes far less time.
"""

import time

import torch

from deployments.engine.kv_slots import KVShape
from deployments.engine.model_loader import LoadedModel

REPEATS = 10


def read_bandwidth(device: torch.device) -> float:
    """Measure how fast the device reads its memory: bytes per second, the best of some rounds."""
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
    """Return what a decode step reads.

    Args:
        loaded: The model.
        num_seqs: Sequences.
        num_tokens: Tokens that each of them holds, on average.
    """
    config = loaded.text_config
    num_bytes = loaded.num_weight_bytes
    if not config.tie_word_embeddings:
        # Of a table of its own only the rows of a few tokens are read.
        table = loaded.model.get_input_embeddings().weight
        assert isinstance(table, torch.Tensor)
        num_bytes -= table.nbytes
    shape = KVShape.of(config, loaded.model.dtype)
    return num_bytes + num_seqs * num_tokens * len(shape.windows) * shape.bytes_per_layer_token
