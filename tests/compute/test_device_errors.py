import pytest
import torch

from deployments.compute.device_errors import is_fatal, is_out_of_memory, release_cache


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
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ValueError("out of memory, says the user"), False, False),
    ],
)
def test_errors_are_classified(error: Exception, is_short: bool, is_final: bool) -> None:
    assert (is_out_of_memory(error), is_fatal(error)) == (is_short, is_final)


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
