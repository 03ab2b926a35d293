"""The fingerprint of what a model's texts depend on: its files, and what computes with them.

Replicas with one fingerprint continue each other's texts. Files count by their content and not by
their names or times, so that other weights in the same folder are another version, and a copy of
the same files is the same.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch
import transformers
from transformers.utils.hub import cached_file

from deployments.contract.model_spec import ModelSpec

PATTERNS: Final = (
    "*.safetensors",
    "*config.json",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)
"""The files of a model, as transformers names them: weights, configurations, tokenizer, template.
A card, or the results of an evaluation, may change."""

MAX_NUM_THREADS: Final = 4
"""Files that are read at the same time. A core reads 2 GB/s: 15 GB in four files take 2 s."""

_SHA256: Final = re.compile("[0-9a-f]{64}")


def content_digest(folder: Path) -> str:
    """Return a digest of the contents of a model's files, 64 hexadecimal digits.

    Reads all of them, except those of a hub's cache that are named by their content.

    Raises:
        OSError: A file can't be read.
    """
    files = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    with ThreadPoolExecutor(MAX_NUM_THREADS, thread_name_prefix="digest") as threads:
        digests = threads.map(_file_digest, files)
        names = [path.relative_to(folder).as_posix() for path in files]
        return _digest_of(zip(names, digests, strict=True))


def model_folder(spec: ModelSpec) -> Path:
    """Return the folder of a model's files; a hub's model must have been loaded before.

    Raises:
        OSError: The files are not there.
    """
    if os.path.isabs(spec.source):
        return Path(spec.source)
    config = cached_file(
        spec.source, "config.json", revision=spec.entry.revision, local_files_only=True
    )
    return Path(str(config)).parent


def system_fingerprint(content: str, versions: Mapping[str, str]) -> str:
    """Return `fp_` and ten hexadecimal digits: equal if the same request gets the same text.

    A client that repeats a seed and gets another text can see in the fingerprint that the server
    has changed.

    Args:
        content: The digest of the model's files.
        versions: What texts depend on besides these; see `EngineFacts`.

    Source: https://platform.openai.com/docs/api-reference/chat/object (system_fingerprint)
    """
    return f"fp_{_digest_of([('content', content), *versions.items()])[:10]}"


def versions_of(spec: ModelSpec, device: torch.device) -> dict[str, str]:
    """Return what the texts of a model on the embedded engine depend on besides its files.

    Args:
        spec: The replica's settings.
        device: Where the model runs; its kind decides which kernels compute.
    """
    return {
        "dtype": spec.entry.dtype,
        "quantization": spec.entry.quantization or "",
        "kernels": _kernels(device),
        **package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute every model's texts."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "raystream": _own_version(),
    }


def _file_digest(path: Path) -> str:
    blob = path.resolve()
    # The hub's cache names large files by their SHA-256.
    if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return blob.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(pairs: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(list(pairs)).encode()).hexdigest()


def _kernels(device: torch.device) -> str:
    """Return which instructions the kernels of a device are compiled for."""
    if device.type == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _own_version() -> str:
    try:
        return version("raystream")
    except PackageNotFoundError:
        return "unknown"
