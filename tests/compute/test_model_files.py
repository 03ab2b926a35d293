import pytest
import torch
from transformers import Qwen2Config

from deployments.compute.model_files import choose_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("stored", "asked", "device", "has_bf16", "chosen"),
    [
        ("bfloat16", "auto", CPU, True, torch.bfloat16),
        ("bfloat16", "auto", CPU, False, torch.float32),
        ("bfloat16", "auto", CUDA, False, torch.bfloat16),
        ("float16", "auto", CPU, True, torch.float32),
        ("float16", "auto", CUDA, True, torch.float16),
        ("float32", "auto", CPU, True, torch.float32),
        (None, "auto", CUDA, True, torch.float32),
        ("bfloat16", "float32", CPU, True, torch.float32),
        ("float32", "float16", CPU, True, torch.float16),
    ],
)
def test_auto_keeps_the_files_dtype_unless_the_cpu_is_slow_at_it(
    monkeypatch: pytest.MonkeyPatch,
    stored: str | None,
    asked: str,
    device: torch.device,
    has_bf16: bool,
    chosen: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    assert choose_dtype(Qwen2Config(dtype=stored), asked, device) is chosen
