from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import Qwen2Config

from deployments.compute import model_files
from deployments.compute.errors import UnsupportedModelError
from deployments.compute.model_files import choose_dtype, wrap_load_errors

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
    monkeypatch.setattr(model_files, "has_bfloat16", lambda: has_bf16)
    assert choose_dtype(Qwen2Config(dtype=stored), asked, device) is chosen


def wrapped(error: Exception) -> RuntimeError:
    """Return an error that another one led to, as libraries raise them."""
    outer = RuntimeError("the download failed\nwith details")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(28, "No space left on device", "/cache/x.incomplete"), "the disk is full; free"),
        (wrapped(OSError(122, "Disk quota exceeded")), "the disk is full; free some space, or"),
        (SafetensorError("incomplete metadata"), "damaged (incomplete metadata); copy or download"),
        (
            OSError("We couldn't connect to the hub.\nCheck"),
            "no repository of this name was found: We couldn't connect to the hub; check `source`",
        ),
        (ValueError("a shape does not fit\nin detail"), "'org/model': a shape does not fit"),
    ],
)
def test_a_load_error_becomes_one_line_that_says_what_to_do(error: Exception, advice: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught, wrap_load_errors("org/model"):
        raise error
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_exists_is_not_called_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught, wrap_load_errors(str(tmp_path)):
        raise OSError(f"{tmp_path} does not appear to have a file named config.json.")
    assert "config.json" in str(caught.value)
    assert "no such folder" not in str(caught.value)
