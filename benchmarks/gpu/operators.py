"""Times our attention of decode rows and our products beside torch's, each in graphs of its own."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from deployments.compute.speedups import import_row_attention, import_row_product
from deployments.engine.attention.varlen_reads import ExtentReads

NUM_RUNS = 9

LEAST_BYTES = 2**28
"""What the calls of a graph read together, so that no cache holds what the next replay reads."""

NUM_CALLS = 60
"""Calls of a graph: enough that its launch takes a small part of the time."""

ATTENTION = (
    ("Qwen2.5-7B", 28, 4, 128, ((1, 560), (32, 560), (256, 560), (8, 8000), (1, 30_000))),
    ("Gemma 3 12B", 16, 8, 256, ((1, 560), (32, 560))),
)
"""A model's heads, heads of keys and their size; sequences, and tokens of each."""

Call = Callable[[int], torch.Tensor]
"""Runs an operator on the memory of a number."""

PRODUCTS = (("gate and up", 37_888, 3584), ("down", 3584, 18_944), ("head", 152_064, 3584))
"""The large weights of Qwen2.5-7B: outputs and inputs."""


def attention_rows(device: torch.device, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield the attention of decode rows.

    Args:
        device: A GPU.
        bandwidth: Bytes per second; see `read_bandwidth`.
    """
    attend_rows = import_row_attention()
    for model, num_heads, num_kv_heads, head_dim, cases in ATTENTION:
        for num_seqs, length in cases:
            size = num_seqs * length + 1, num_kv_heads, head_dim
            num_bytes = 4 * num_kv_heads * head_dim * num_seqs * length
            stored = [
                tuple(_random(*size, device=device) for _ in range(2))
                for _ in range(_num_copies(num_bytes))
            ]
            query = _random(num_seqs, num_heads, head_dim, device=device)
            starts = length * torch.arange(num_seqs, device=device)
            lengths = torch.full((num_seqs,), length, device=device)
            ways = [
                ExtentReads.of_rows(starts, lengths, num_seqs * length, 2**15, attend)
                for attend in (attend_rows, None)
            ]
            calls = [partial(_attend, reads, query, stored) for reads in ways]
            what = f"attention of {model}, {num_seqs} x {length}"
            yield {"what": what, **_compare(num_bytes / bandwidth, *calls)}


def _attend(
    reads: ExtentReads,
    query: torch.Tensor,
    stored: Sequence[tuple[torch.Tensor, ...]],
    number: int,
) -> torch.Tensor:
    keys, values = stored[number % len(stored)]
    return reads.attend(query, keys, values, None)


def product_rows(device: torch.device, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Yield products of few rows; see `attention_rows`."""
    for name, width, num_inputs in PRODUCTS:
        num_bytes = 2 * width * num_inputs
        weights = [_random(width, num_inputs, device=device) for _ in range(_num_copies(num_bytes))]
        for num_rows in (1, 8, 32):
            rows = _random(num_rows, num_inputs, device=device)
            calls = [
                partial(_multiply, product, rows, weights)
                for product in (import_row_product(), linear)
            ]
            what = f"{name}, {num_rows} x {num_inputs} x {width}"
            yield {"what": what, **_compare(num_bytes / bandwidth, *calls)}


def _multiply(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    number: int,
) -> torch.Tensor:
    return product(rows, weights[number % len(weights)])


def _compare(floor_s: float, ours: Call, torchs: Call) -> dict[str, float]:
    """Return the times of a call, and how much the results differ; both run in turn."""
    expected, found = (call(0).float() for call in (torchs, ours))
    error = (found - expected).abs().max().item() / expected.abs().max().item()
    graphs = [_graph(call) for call in (ours, torchs)]
    times = [[_seconds(graph) for graph in graphs] for _ in range(NUM_RUNS)]
    ours_s, torchs_s = (statistics.median(each) / NUM_CALLS for each in zip(*times, strict=True))
    return {
        "floor, us": round(1e6 * floor_s, 1),
        "ours, us": round(1e6 * ours_s, 1),
        "torch's, us": round(1e6 * torchs_s, 1),
        "of the bandwidth": round(floor_s / ours_s, 2),
        "torch's of it": round(floor_s / torchs_s, 2),
        "largest difference": round(error, 4),
    }


def _num_copies(num_bytes: int) -> int:
    return max(2, min(24, LEAST_BYTES // num_bytes))


def _random(*size: int, device: torch.device) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device)


def _graph(call: Call) -> torch.cuda.CUDAGraph:
    """Capture calls, after one that is not captured."""
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call] # torch leaves it untyped
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(NUM_CALLS):
                call(number)
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started
