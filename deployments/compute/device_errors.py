"""Tells what an error means for the device: out of memory, lost for good, or neither.

No error is stored here: its traceback would keep the tensors of the failed step alive.
"""

import logging

import torch

logger = logging.getLogger(__name__)

OUT_OF_MEMORY_SIGNS = (
    "out of memory",  # CUDA's own message, for memory that torch's allocator did not ask for
    "_ALLOC_FAILED",  # the end of a status of cuBLAS, cuSOLVER and cuFFT, and of cuDNN before 9
    "_HOST_ALLOCATION_FAILED",  # of cuDNN
    "_DEVICE_ALLOCATION_FAILED",  # of cuDNN
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Messages of out-of-memory errors that are not a `torch.OutOfMemoryError`.

Source: torch, c10/core/impl/alloc_cpu.cpp; CUDA, cudaErrorMemoryAllocation; cuBLAS,
cublasStatus_t; cuDNN, cudnnStatus_t.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, so that a smaller step may pass."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(s in str(error) for s in OUT_OF_MEMORY_SIGNS)


def is_fatal(error: BaseException) -> bool:
    """Return whether the device is lost to this process, so that no input is at fault.

    After an illegal access or a failed assertion every later call in the process fails, too, that
    of a library (cuBLAS, cuDNN) with a `RuntimeError`. After a refused launch (of too many threads,
    for example) later calls work. So the device is asked.

    Source: CUDA, cudaErrorAssert and similar errors: the process must be restarted.
    """
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return not (torch.cuda.is_available() and _still_answers())
    # Asking would initialise CUDA in a process that does not use it.
    uses_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch leaves it untyped
    return isinstance(error, RuntimeError) and uses_cuda and not _still_answers()


def is_of_device(error: BaseException) -> bool:
    """Return whether an error is the device's own: it is lost, or its memory ran out.

    Such an error says nothing about what was tried, so it is no reason to do without it.
    """
    return is_out_of_memory(error) or is_fatal(error)


def _still_answers() -> bool:
    try:
        torch.cuda.synchronize()
        # The current GPU may answer though another one that the process uses is lost.
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)
    except RuntimeError:
        return False
    return True


def release_cache(device: torch.device) -> None:
    """Return the allocator's unused memory to the device."""
    if device.type != "cuda":
        return
    try:
        # The allocator waits only for the stream that memory belongs to. Captured steps run on
        # another stream.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        if is_fatal(error):
            raise
        # Only the cache is affected. The next step shows whether there is enough memory.
        logger.warning("could not empty the allocator's cache", exc_info=True)
