"""Estimates how much device memory a model needs, from its sizes and its weights' bytes.

Nothing here imports torch: memory is planned before anything is loaded.
"""

from deployments.plan.graph_sizes import DecodeBuckets, mixed_sizes
from deployments.plan.kv_layout import BLOCK_SIZE, layers_by_capacity
from deployments.plan.memory_budget import (
    OUTSIDE_BYTES,
    GroupDemand,
    MemoryDemand,
    activation_bytes,
    graph_bytes,
    image_bytes,
    penalty_bytes,
)
from deployments.plan.model_shape import ITEM_BYTES, ModelShape


def memory_demand(
    shape: ModelShape,
    *,
    weight_bytes: int,
    dtype: str,
    step_dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    max_batched_tokens: int,
    max_graphs: int = 0,
    on_gpu: bool = False,
) -> MemoryDemand:
    """Return the memory that a model needs for steps of a given size.

    A prompt with images can't be split into chunks, so a model that takes images may run a step of
    max_model_len tokens.

    Args:
        shape: The model.
        weight_bytes: Bytes of its weights.
        dtype: Name of the type of the model, of its keys and values, and of its logits.
        step_dtype: Name of the type in which its linear layers compute.
        max_model_len: The most tokens of a sequence.
        max_num_seqs: Sequences that run at the same time.
        max_batched_tokens: Tokens per step.
        max_graphs: The most captured decode steps that are kept if attention reads masks; 0 if
            none are captured.
        on_gpu: Whether it runs on a GPU.
    """
    if shape.has_images:
        max_batched_tokens = max(max_batched_tokens, max_model_len)

    def step_bytes(num_tokens: int, num_seqs: int) -> int:
        return activation_bytes(
            max_batched_tokens=num_tokens,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            num_seqs=num_seqs,
            itemsize=ITEM_BYTES[step_dtype],
        )

    item_bytes = ITEM_BYTES[dtype]
    layers = layers_by_capacity(shape.windows, max_model_len)
    captured_bytes = 0
    if max_graphs:
        is_by_length = shape.reads_by_length(dtype)
        buckets = DecodeBuckets(max_num_seqs, max(layers), is_by_length)
        num_logits = max_num_seqs * shape.vocab_size
        mixed = mixed_sizes(max_batched_tokens) if is_by_length else ()
        num_graphs = buckets.num_sizes + len(mixed)
        captured_bytes = graph_bytes(
            num_graphs=num_graphs if is_by_length else min(max_graphs, num_graphs),
            num_layers=shape.num_layers,
            # A captured step's logits stay in the model's dtype until the step ends.
            decode_bytes=step_bytes(max(max_num_seqs, *mixed, 0), 0) + num_logits * item_bytes,
            num_logits=num_logits,
            itemsize=item_bytes,
        )
    step = step_bytes(max_batched_tokens, max_num_seqs)
    layer_token_bytes = 2 * shape.num_kv_heads * shape.head_dim * item_bytes
    if shape.has_images:
        # A prompt with images fills a cache of its own, which is copied into its extents.
        num_kept = sum(capacity * num_layers for capacity, num_layers in layers.items())
        step += num_kept * layer_token_bytes
    # Gemma's images look ahead, which takes a mask; Qwen's don't, so only a window takes one.
    masked = set(shape.windows) - ({None} if shape.image_token_elements else set())
    if shape.has_images and masked:
        step += image_bytes(
            num_tokens=max_model_len,
            num_masks=len(masked),
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            itemsize=item_bytes,
        )
    if on_gpu:
        step += penalty_bytes(
            num_seqs=max_num_seqs, max_model_len=max_model_len, vocab_size=shape.vocab_size
        )
    return MemoryDemand(
        weight_bytes=weight_bytes,
        # The tower runs before the text model, on images of at most all tokens of a sequence.
        activation_bytes=max(step, max_model_len * shape.image_token_elements * item_bytes),
        groups=tuple(
            GroupDemand(capacity, num_layers * layer_token_bytes, BLOCK_SIZE)
            for capacity, num_layers in layers.items()
        ),
        graph_bytes=captured_bytes,
        outside_bytes=OUTSIDE_BYTES if on_gpu else 0,
    )
