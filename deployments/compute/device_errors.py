"""What an error says about the device: out of memory, gone for good, or neither.

Nothing here remembers an error: its traceback would keep the tensors of the step that failed alive.
"""

import logging

import torch

logger = logging.getLogger(__name__)

OUT_OF_MEMORY_SIGNS = (
    "out of memory",  # CUDA's own words, when another than torch's allocator asked
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""How errors that are not `torch.OutOfMemoryError` tell of it.

Source: torch, c10/core/impl/alloc_cpu.cpp; CUDA, cudaErrorMemoryAllocation.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a smaller step might have passed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error) for s in OUT_OF_MEMORY_SIGNS)


def is_fatal(error: BaseException) -> bool:
    """Return whether the device will run nothing any more, so that no sequence is to blame.

    After an illegal access or a failed assertion every later call of the process fails, too. After
    a launch that was refused (of too many threads, say) none does.

    Source: CUDA, cudaErrorAssert and its like: the process must be ended and started again.
    """
    if not isinstance(error, torch.AcceleratorError) or is_out_of_memory(error):
        return False
    return not _still_answers()


def _still_answers() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def release_cache(device: torch.device) -> None:
    """Give the memory that the allocator holds but does not use back to the device."""
    if device.type != "cuda":
        return
    try:
        # Captured steps run on another stream than the one that their memory belongs to, for which
        # alone the allocator waits.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if is_fatal(error):
            raise
        # The allocator's own books; whether there is memory, the next step will tell.
        logger.warning("the allocator's cache could not be emptied", exc_info=True)
