"""Checks while a model's files are loaded: complete weights and tokenizer, dtype, clear errors."""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from deployments.compute.cpu.processor import has_bfloat16
from deployments.compute.device_errors import is_out_of_memory
from deployments.compute.errors import UnsupportedModelError
from deployments.model_shape import choose_dtype_name, stored_dtype

LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)
"""Errors raised for broken or missing files, shapes that don't fit and missing packages."""


@contextmanager
def wrap_load_errors(source: str) -> Iterator[None]:
    """Raise load errors of the block as an `UnsupportedModelError`: a line that says what to do.

    Raises:
        UnsupportedModelError: A file is missing or broken, or the block raised this error itself.
        RuntimeError: Memory ran out, so the files may be right; see `is_out_of_memory`.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except LOAD_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(f"can't load {source!r}: {_advice(source, error)}") from error


def _advice(source: str, error: Exception) -> str:
    summary = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if _is_disk_full(error):
        return "the disk is full; free some space, or set HF_HOME to a folder on another disk"
    if isinstance(error, SafetensorError):
        return f"its weights are damaged ({summary}); copy or download them again"
    if isinstance(error, OSError) and not Path(source).is_dir():
        return (
            "there is no such folder, and no repository of this name was found: "
            f"{summary.rstrip('.')}; check `source` in the model's entry"
        )
    return summary


def _is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, says that a disk has no space left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def require_all_weights(source: str, missing_keys: Iterable[str], advice: str = "") -> None:
    """Refuse a model with missing weights, which transformers would initialise at random.

    Raises:
        UnsupportedModelError: Weights are missing; the message ends with the advice.
    """
    missing = sorted(missing_keys)
    if missing:
        raise UnsupportedModelError(
            f"can't load {source!r}: it lacks {len(missing)} weights, {missing[0]} among them"
            + advice
        )


def require_tokenizer_files(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that transformers made without any files.

    Raises:
        UnsupportedModelError: It knows only special tokens.
    """
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UnsupportedModelError(f"can't load {source!r}: it has no tokenizer files")


def choose_dtype(config: PreTrainedConfig, dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights on the device; see `choose_dtype_name`."""
    on_cpu = device.type == "cpu"
    has_bf16 = on_cpu and has_bfloat16()
    chosen = choose_dtype_name(stored_dtype(config), dtype, on_cpu=on_cpu, has_bf16=has_bf16)
    found = getattr(torch, chosen)
    assert isinstance(found, torch.dtype)
    return found
