import pytest
import torch

from deployments.compute.device_errors import (
    is_fatal,
    is_of_device,
    is_out_of_memory,
    release_cache,
)


def cudnn_error(cause: str) -> RuntimeError:
    return RuntimeError(f"cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_{cause}")


def test_the_cpu_allocators_own_error_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "is_short", "is_final"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True, False),
        (MemoryError(), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, False),
        (cudnn_error("HOST_ALLOCATION_FAILED"), True, False),
        (cudnn_error("DEVICE_ALLOCATION_FAILED"), True, False),
        (cudnn_error("TEXTURE_CREATION_FAILED"), False, False),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ValueError("out of memory, says the user"), False, False),
    ],
)
def test_errors_are_classified(error: Exception, is_short: bool, is_final: bool) -> None:
    assert (is_out_of_memory(error), is_fatal(error)) == (is_short, is_final)
    assert is_of_device(error) == (is_short or is_final)


def test_only_a_gpu_has_a_cache_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("emptied"))
    release_cache(torch.device("cpu"))
    assert not asked
    device = torch.device("cuda", 1)
    release_cache(device)
    assert asked == [device, "emptied"]


@pytest.mark.parametrize("still_answers", [False, True])
def test_an_error_is_fatal_if_the_device_no_longer_answers(
    monkeypatch: pytest.MonkeyPatch, still_answers: bool
) -> None:
    error = torch.AcceleratorError("CUDA error: invalid configuration argument")

    def synchronize() -> None:
        if not still_answers:
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_fatal(error) != still_answers


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_an_error_of_a_library_is_fatal_if_the_device_no_longer_answers(
    monkeypatch: pytest.MonkeyPatch, is_poisoned: bool
) -> None:
    def synchronize() -> None:
        if is_poisoned:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx")
    assert is_fatal(error) == is_poisoned
    assert not is_fatal(ValueError("not a library's"))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_error_is_fatal_if_another_gpu_of_the_process_no_longer_answers(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    asked = list[int]()

    def synchronize(index: int = 0) -> None:
        asked.append(index)
        if index == lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2**20 * (index == 1))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_fatal(RuntimeError("Triton Error [CUDA]: an illegal memory access")) == (lost < 2)
    assert 2 not in asked  # that would make a context there
