"""How torch's allocator takes memory from a GPU."""

import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch itself reads such settings from. Whoever writes one knows better than we do."""

EXPANDABLE = "expandable_segments:True"


def let_segments_grow() -> bool:
    """Let the allocator's segments grow instead of adding more; return whether it was told to.

    Steps differ in size, and in segments of fixed size the blocks of one step fit the next one
    badly: memory is lost that the plan counts on.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    """
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        logger.info("the allocator's settings come from the environment")
        return False
    # This is private, but works at any time; torch may have read its environment by now.
    configure: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:
        logger.warning("segments of the GPU's memory can't grow: torch has no switch for it")
        return False
    try:
        configure(EXPANDABLE)
    except (RuntimeError, ValueError) as error:
        logger.warning("segments of the GPU's memory can't grow: %s", error)
        return False
    return True
