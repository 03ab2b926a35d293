"""What a loaded model asks of its device's memory."""

import torch

from deployments.engine.cpu.quantization import is_quantized
from deployments.engine.cuda.decode_buckets import DecodeBuckets
from deployments.engine.kv_slots import KVShape
from deployments.engine.model_loader import LoadedModel
from deployments.gpu.budget import MemoryDemand, activation_bytes, graph_bytes


def memory_demand(
    loaded: LoadedModel,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_graphs: int = 0,
) -> MemoryDemand:
    """Return the model's demand, in bytes, for a given size of slots and steps.

    A prompt with images can't be cut, so a model that takes them may meet a step of max_model_len.
    Int8 layers take and give float32 inside, whatever the rest computes in.

    Args:
        loaded: The model.
        max_model_len: Tokens of a slot.
        max_num_seqs: Sequences that run at once.
        max_batched_tokens: Tokens of a step.
        max_graphs: Captured decode steps that may be kept; 0 where none are captured.
    """
    config = loaded.text_config
    dtype = loaded.model.dtype
    if loaded.processor is not None:
        max_batched_tokens = max(max_batched_tokens, max_model_len)

    def step_bytes(num_tokens: int, num_seqs: int) -> int:
        return activation_bytes(
            max_batched_tokens=num_tokens,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocab_size=config.vocab_size,
            num_seqs=num_seqs,
            itemsize=torch.float32.itemsize if is_quantized(loaded.model) else dtype.itemsize,
        )

    shape = KVShape.of(config, dtype)
    captured_bytes = 0
    if max_graphs:
        buckets = DecodeBuckets(max_num_seqs, max(shape.capacities(max_model_len)))
        num_logits = max_num_seqs * config.vocab_size
        captured_bytes = graph_bytes(
            num_graphs=min(max_graphs, buckets.num_sizes),
            num_layers=config.num_hidden_layers,
            # A captured step's logits stay in the model's dtype until it is over.
            decode_bytes=step_bytes(max_num_seqs, 0) + num_logits * dtype.itemsize,
            num_logits=num_logits,
            itemsize=dtype.itemsize,
        )
    return MemoryDemand(
        weight_bytes=loaded.num_weight_bytes,
        activation_bytes=step_bytes(max_batched_tokens, max_num_seqs),
        slot_bytes=shape.slot_bytes(max_model_len),
        graph_bytes=captured_bytes,
    )
