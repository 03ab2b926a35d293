"""The host's memory that models on a GPU take while they sleep lightly."""

from typing import Final

VLLM_HOST_PART: Final = 2.0
"""What vLLM's weights may take, as a multiple of their bytes: torch rounds each pinned block up to
a power of two."""


def pinned_bytes(weight_bytes: int, *, by_vllm: bool) -> int:
    """Return the most host memory that a replica keeps pinned once it has slept on a GPU.

    raystream's own engine cuts its copy into blocks that torch does not round up.

    Args:
        weight_bytes: Of the model.
        by_vllm: Whether vLLM runs it.
    """
    return int(weight_bytes * VLLM_HOST_PART) if by_vllm else weight_bytes
