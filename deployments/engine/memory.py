"""What a loaded model asks of its device's memory."""

import torch

from deployments.engine.cpu.quantization import is_quantized
from deployments.engine.kv_slots import KVShape
from deployments.engine.model_loader import LoadedModel
from deployments.gpu.budget import MemoryDemand, activation_bytes


def memory_demand(
    loaded: LoadedModel, *, max_model_len: int, max_num_seqs: int, max_batched_tokens: int
) -> MemoryDemand:
    """Return the model's demand, in bytes, for a given size of slots and steps.

    A prompt with images can't be cut, so a model that takes them may meet a step of max_model_len.
    Int8 layers take and give float32 inside, whatever the rest computes in.
    """
    config = loaded.text_config
    dtype = loaded.model.dtype
    if loaded.processor is not None:
        max_batched_tokens = max(max_batched_tokens, max_model_len)
    return MemoryDemand(
        weight_bytes=loaded.num_weight_bytes,
        activation_bytes=activation_bytes(
            max_batched_tokens=max_batched_tokens,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocab_size=config.vocab_size,
            num_seqs=max_num_seqs,
            itemsize=torch.float32.itemsize if is_quantized(loaded.model) else dtype.itemsize,
        ),
        slot_bytes=KVShape.of(config, dtype).slot_bytes(max_model_len),
    )
