"""The host's memory that models on a GPU take while they sleep lightly."""

from typing import Final

VLLM_HOST_PART: Final = 2.0
"""What vLLM's weights may take, as a multiple of their bytes: torch rounds each pinned block up to
a power of two."""
