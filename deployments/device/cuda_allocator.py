"""Configures how torch's allocator takes memory from a GPU."""

import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that torch reads its settings from. A user who sets one overrides ours."""

EXPANDABLE = "expandable_segments:True"


def let_segments_grow() -> bool:
    """Make the allocator grow its segments instead of adding more; return whether it will.

    Steps differ in size. In segments of fixed size, the blocks of one step fit the next one badly,
    and that wastes memory that the plan relies on.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    """
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        logger.info("the allocator's settings come from the environment")
        return False
    # A private call, but it works at any time; torch may have read its environment already.
    configure: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:
        logger.warning("segments of the GPU's memory can't grow: this torch has no setting for it")
        return False
    try:
        configure(EXPANDABLE)
    except (RuntimeError, ValueError) as error:
        logger.warning("segments of the GPU's memory can't grow: %s", error)
        return False
    return True
