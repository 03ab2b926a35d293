"""Refuses a checkpoint by its files, before anything is loaded: adapters and quantized weights.

`raystream check`, `raystream plan` and every replica ask the same function, so that they agree.
Nothing here imports torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from deployments.contract.unsupported_model import UnsupportedModelError

ADAPTER_FILE: Final = "adapter_config.json"
CONFIG_FILE: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

QUANTIZED_KEYS: Final[Mapping[str, str]] = {
    "quantization_config": "quantization_config",
    "compression_config": "compressed-tensors",
    "quantization": "MLX",
}
"""Keys of a configuration that mark quantized weights, each with the method if it names none."""

DEQUANTIZED: Final = frozenset({"mxfp4"})
"""Methods whose weights become plain ones when they are loaded. gpt-oss has no other checkpoint."""

QUANTIZED_FILES: Final[Mapping[str, str]] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files beside weights that mark the same, with the method: AutoGPTQ, AutoAWQ, NVIDIA ModelOpt."""


TEMPLATE_FILES: Final = ("chat_template.jinja", "chat_template.json")
TEMPLATE_FOLDER: Final = "additional_chat_templates"
"""Where transformers keeps chat templates, besides tokenizer_config.json."""


def check_checkpoint(
    source: str, revision: str | None, *, local_only: bool = False, may_be_quantized: bool = False
) -> None:
    """Refuse a checkpoint with an adapter, or with weights that stay quantized.

    A file that is missing or can't be read refuses nothing: loading says what is wrong with it.
    The hub is asked only until the model's configuration is in the cache: without a network, each
    file that is asked for would wait for many attempts.

    Args:
        source: A folder, a configuration's file, or the id of a hub repository.
        revision: A commit of the hub repository.
        local_only: Whether a hub repository is read only as far as it is in the cache.
        may_be_quantized: Whether quantized weights are right, as for vLLM.

    Raises:
        UnsupportedModelError: It can't be served; the message names the file or the method.
    """
    local_only = local_only or bool(find_file(source, revision, CONFIG_FILE, local_only=True))
    if find_file(source, revision, ADAPTER_FILE, local_only=local_only):
        raise UnsupportedModelError(
            f"{source!r} has an adapter ({ADAPTER_FILE}), which is not applied: merge it into the "
            "weights (merge_and_unload of peft) and serve the merged folder, or remove the file "
            "to serve the model without it"
        )
    if may_be_quantized:
        return
    config = find_file(source, revision, CONFIG_FILE, local_only=local_only)
    methods = [] if config is None else [*_quantized_by(_read(config))]
    methods = [method for method in methods if method not in DEQUANTIZED]
    methods += [
        method
        for name, method in QUANTIZED_FILES.items()
        if find_file(source, revision, name, local_only=local_only)
    ]
    if methods:
        raise UnsupportedModelError(
            f"{source!r} is quantized ({methods[0]}), and only unquantized weights are served: "
            "take the checkpoint that it was made from; on a CPU, `quantization: int8` or `int4` "
            "in the model's entry makes that one small; on a GPU, `engine: vllm` runs it as it is"
        )


def _quantized_by(config: Any) -> Iterator[str]:
    """Yield the methods that a configuration names, or one of its parts, such as text_config."""
    if not isinstance(config, Mapping):
        return
    for key, name in QUANTIZED_KEYS.items():
        found = config.get(key)
        if isinstance(found, Mapping) and found:
            yield str(found.get("quant_method") or found.get("quant_algo") or name)
    for key, part in config.items():
        if key.endswith("_config") and key not in QUANTIZED_KEYS:
            yield from _quantized_by(part)


def find_file(
    source: str, revision: str | None, name: str, *, local_only: bool = False
) -> Path | None:
    """Return the path of a checkpoint's file; None if it has none of this name.

    Args:
        source: See `check_checkpoint`.
        revision: See `check_checkpoint`.
        name: The file's name in the folder or the repository.
        local_only: See `check_checkpoint`.
    """
    place = Path(source)
    if place.is_file():
        return place if name == CONFIG_FILE else None
    if place.is_dir() or place.is_absolute():
        return file if (file := place / name).is_file() else None
    try:
        # Asked first: without a network, each download would wait for its timeout.
        known = try_to_load_from_cache(source, name, revision=revision)
        if known is None and not local_only:
            known = hf_hub_download(source, name, revision=revision)
    except (OSError, ValueError, HfHubHTTPError):  # no such file or repository, or no network
        return None
    return Path(known) if isinstance(known, str) else None


def shards_of(source: str, revision: str | None, *, local_only: bool = False) -> Sequence[str]:
    """Return the names of the files that hold a model's weights.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
        local_only: Whether the hub is not asked.
    """
    index = find_file(source, revision, INDEX, local_only=local_only)
    try:
        names = {} if index is None else json.loads(index.read_text("utf-8"))["weight_map"]
        return sorted(set(names.values())) or (WEIGHTS,)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # the loader names the fault
        return (WEIGHTS,)


def weights_of(source: str, revision: str | None) -> tuple[int, int]:
    """Return how many files on this machine hold a model's weights, and their bytes."""
    names = shards_of(source, revision, local_only=True)
    files = [find_file(source, revision, name, local_only=True) for name in names]
    sizes = [file.stat().st_size for file in files if file is not None]
    return len(sizes), sum(sizes)


def lacks_chat_template(source: str, revision: str | None) -> bool:
    """Return whether a checkpoint has no chat template; False if its tokenizer is not here.

    Args:
        source: See `check_checkpoint`.
        revision: See `check_checkpoint`.
    """
    settings = read_json(source, revision, "tokenizer_config.json")
    if not settings or settings.get("chat_template"):
        return False
    if any(find_file(source, revision, name, local_only=True) for name in TEMPLATE_FILES):
        return False
    folder = Path(source, TEMPLATE_FOLDER)  # several, of which one is the default
    return not (folder.is_dir() and any(folder.glob("*.jinja")))


def read_json(source: str, revision: str | None, name: str) -> Mapping[str, Any]:
    """Return what a checkpoint's file on this machine holds; empty if it is no JSON object."""
    file = find_file(source, revision, name, local_only=True)
    found = None if file is None else _read(file)
    return found if isinstance(found, Mapping) else {}


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
