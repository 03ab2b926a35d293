"""The number of a model's weights, from the headers of its files.

These are a folder's, the cache's or the hub's, which sends some kilobytes.
"""

import json
import logging
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
from safetensors import safe_open

from deployments.plan.model_shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)


def counted_shape(
    config: "PreTrainedConfig", source: str, revision: str | None, *, is_pooler: bool
) -> ModelShape:
    """Return a model's sizes, with the weights that its files hold if their headers can be read.

    Args:
        config: Its configuration.
        source: See `count_weights`.
        revision: See `count_weights`.
        is_pooler: Whether the model classifies or embeds.

    Raises:
        ValueError: The configuration lacks a size.
    """
    shape = ModelShape.of(config, is_pooler=is_pooler)
    # The files of weights that are dequantized hold fewer numbers.
    is_quantized = getattr(config, "quantization_config", None) is not None
    counted = None if is_quantized else count_weights(source, revision)
    return shape if counted is None else shape.with_counted(counted)


def count_weights(source: str, revision: str | None = None) -> int | None:
    """Return the number of weights in a model's files, from their headers.

    Args:
        source: A folder, a configuration's file, or the id of a hub repository, of which only some
            kilobytes are read if it is not in the cache.
        revision: A commit of the hub repository.

    Returns:
        The number, or None if there are no files, they are damaged, or the hub can't be reached.
    """
    folder: Path | None = Path(source)
    if Path(source).is_file():
        return None  # a configuration by itself
    try:
        if not Path(source).is_dir():
            cached = try_to_load_from_cache(source, "config.json", revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else None
        if folder is not None and (files := _weight_files(folder)):
            return sum(map(_num_weights_in, files))
        if Path(source).is_dir():
            return None
        found = get_safetensors_metadata(source, revision=revision)
        return sum(found.parameter_count.values())
    except Exception as error:  # noqa: BLE001 - an estimate does, too; loading tells what is wrong
        logger.debug("the sizes of %s can't be read: %s", source, error)
        return None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load; none if one of them is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [folder / name for name in sorted(names)]
    return files if all(file.is_file() for file in files) else []


def _num_weights_in(file: Path) -> int:
    with safe_open(file, framework="numpy") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - it is no mapping
