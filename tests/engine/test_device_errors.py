import pytest
import torch

from deployments.engine.device_errors import is_fatal, is_out_of_memory, release_cache


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
def test_errors_are_told_apart(error: Exception, is_short: bool, is_final: bool) -> None:
    assert (is_out_of_memory(error), is_fatal(error)) == (is_short, is_final)


def test_only_a_gpu_has_a_cache_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    release_cache(torch.device("cpu"))
    assert not emptied
    release_cache(torch.device("cuda", 1))
    assert emptied == ["cuda"]
