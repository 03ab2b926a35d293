"""Calculates how many KV slots fit into a replica's share of a device.

    budget = min(share x total, total - foreign) x (1 - headroom)
             - weights - activations - graphs

`foreign` is memory that this process's allocator has not taken: the CUDA context, and the memory of
other processes. It matters only if they have taken more than their shares.

Source for the bytes of a token: keys and values, per layer and per KV head (not per query head),
`deployments.engine.attention.kv_slots.KVShape.slot_bytes`.
"""

from dataclasses import dataclass

GIB = 2**30

HEADROOM = 0.1
"""The part of a share that stays unplanned: the CUDA context and the libraries' workspaces are
outside the caching allocator, and blocks fragment."""


class DeviceMemoryError(ValueError):
    """The share can't hold the model and one sequence; the message says what to change."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The memory that a model needs of its share, in bytes.

    Attributes:
        weight_bytes: The weights.
        activation_bytes: The peak of a step, without weights and slots.
        slot_bytes: One KV slot: max_model_len tokens in all layers, or as many as a layer's window.
        graph_bytes: Captured decode steps; 0 if none are captured.
    """

    weight_bytes: int
    activation_bytes: int
    slot_bytes: int
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The division of a share.

    Attributes:
        share_bytes: The usable bytes of the share, without the headroom.
        num_slots: KV slots to allocate.
        slot_bytes: Bytes of one slot.
    """

    share_bytes: int
    num_slots: int
    slot_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes


def activation_bytes(
    *,
    max_batched_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    num_seqs: int,
    itemsize: int,
) -> int:
    """Estimate the peak of a step in bytes, without weights and slots.

    The widest point of a layer holds the residual, its norm, and both halves of the gated MLP for
    every token. The end of a step holds the float32 logits of each sequence, and up to four copies
    while log-probabilities are kept and tokens are sampled.
    """
    per_token = (4 * hidden_size + 3 * intermediate_size) * itemsize
    return max_batched_tokens * per_token + 5 * num_seqs * vocab_size * 4


GRAPH_LAYER_BYTES = 384 * 2**10
"""The bytes of one captured decode step for one layer, from vLLM's measurement: 35 graphs of
Llama-3.2-1B, with 16 layers, took 0.21 GiB, including their common pool. Not measured here.

Source: https://github.com/vllm-project/vllm/pull/11349
"""


def graph_bytes(
    *, num_graphs: int, num_layers: int, decode_bytes: int, num_logits: int, itemsize: int
) -> int:
    """Estimate the memory of captured decode steps, in bytes.

    Args:
        num_graphs: Graphs that are kept at once.
        num_layers: Layers of the model.
        decode_bytes: The peak of the largest captured step, which the graphs' shared pool never
            frees.
        num_logits: Elements of the buffer for the logits of all graphs.
        itemsize: Bytes of one element.
    """
    return num_graphs * num_layers * GRAPH_LAYER_BYTES + decode_bytes + num_logits * itemsize


def plan_kv_slots(
    *,
    total_bytes: int,
    share: float,
    demand: MemoryDemand,
    max_num_seqs: int,
    foreign_bytes: int = 0,
) -> KVPlan:
    """Return how many slots fit into the share, at most one for each sequence that may run.

    Args:
        total_bytes: Memory of the whole device.
        share: The replica's fraction of it, above 0 and at most 1.
        demand: The memory that the model needs.
        max_num_seqs: The most sequences that may run at once, by the configuration.
        foreign_bytes: Memory of the device in use, but not by this process's allocator.

    Raises:
        DeviceMemoryError: Not even one slot fits.
    """
    left_bytes = min(total_bytes * share, max(0, total_bytes - foreign_bytes))
    share_bytes = int(left_bytes * (1 - HEADROOM))
    fixed_bytes = demand.weight_bytes + demand.activation_bytes + demand.graph_bytes
    num_slots = min(max_num_seqs, (share_bytes - fixed_bytes) // demand.slot_bytes)
    if num_slots < 1:
        raise DeviceMemoryError(
            f"a share of {share:g} of {total_bytes / GIB:.2f} GiB, of which others hold "
            f"{foreign_bytes / GIB:.2f} GiB, leaves {share_bytes / GIB:.2f} GiB to use, but the "
            f"model needs {demand.weight_bytes / GIB:.2f} GiB for weights, "
            f"{demand.activation_bytes / GIB:.2f} GiB for a step, {demand.graph_bytes / GIB:.2f} "
            f"GiB for captured steps and {demand.slot_bytes / GIB:.2f} GiB for one sequence; raise "
            "num_gpus (or gpu_share), or lower max_model_len or max_batched_tokens, or switch "
            "cuda_graphs off"
        )
    return KVPlan(share_bytes, num_slots, demand.slot_bytes)
