"""Why a model's files can't be served: what is missing, damaged, or of an unknown type.

Reads the index of the weights and their headers, and loads nothing. Imports neither torch nor Ray.
"""

import json
import re
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import Final

from deployments.contract.descriptions import Engine
from deployments.contract.unsupported_model import (
    UnsupportedModelError,
    pointer_advice,
    pointers_in,
)
from deployments.plan.checkpoint import check_checkpoint
from serve_app.commands.check.source_files import (
    OTHER_FORMATS,
    ModelFiles,
    SourceError,
    read_json,
    unreadable,
)

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

TOKENIZER: Final = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece|tekken")
"""How the name of a tokenizer's file begins."""


def problems(files: ModelFiles, engine: Engine = "raystream") -> Iterator[str]:
    """Yield why a model's files can't be served.

    Args:
        files: The files.
        engine: What runs the model. vLLM knows other types, and runs quantized weights.
    """
    try:
        yield from _problems(files, engine)
    except SourceError as error:
        yield str(error)
    except OSError as error:
        yield unreadable(files.source, error)


def _problems(files: ModelFiles, engine: Engine) -> Iterator[str]:
    source, names = files.source, files.names
    place = str(files.folder or source)
    try:
        check_checkpoint(place, files.commit, local_only=True, may_be_quantized=engine == "vllm")
    except UnsupportedModelError as error:
        # The message begins with the place.
        yield f"{source!r}{str(error).removeprefix(repr(place))}"
        return
    if "config.json" not in names:
        yield _without_config(files)
        return
    yield from () if engine == "vllm" else _type_problems(files)
    yield from weight_problems(files)
    if not any(TOKENIZER.match(name) for name in names):
        yield f"{source!r} has no tokenizer: tokenizer.json, or what it is made from, is missing"


def _type_problems(files: ModelFiles) -> Iterator[str]:
    """Yield why transformers does not know a model's type."""
    source, kind = files.source, files.config.get("model_type")
    if "auto_map" in files.config and not _is_known(kind):
        yield (
            f"{source!r} needs code of its own, which its config.json names as auto_map; code of "
            "models is never run here"
        )
    elif not isinstance(kind, str):
        yield f"{source!r}: its config.json has no model_type, so it is no model of transformers"
    elif not _is_known(kind):
        yield (
            f"{source!r}: its config.json sets model_type to {kind!r}, which the installed "
            "transformers does not know; vLLM may (`engine: vllm`)"
        )


def _without_config(files: ModelFiles) -> str:
    source, names = files.source, files.names
    if not names:
        return f"{source!r} is an empty folder"
    below = sorted(name for name in names if name.endswith("/config.json"))
    if "model_index.json" in names:
        return f"{source!r} holds a pipeline of diffusers, which is not served"
    if files.folder is not None and below:
        folder = files.folder / Path(below[0]).parent
        return f"{source!r} has no config.json; did you mean {str(folder)!r}?"
    return f"{source!r} has no config.json{_other_format(names)}"


def weight_problems(files: ModelFiles) -> Iterator[str]:
    """Yield which files of weights are missing or damaged."""
    source, names, folder = files.source, files.names, files.folder
    if WEIGHTS in names:
        weights = [WEIGHTS]
    elif INDEX not in names:
        yield f"{source!r} has no {WEIGHTS}{_other_format(names)}"
        return
    elif folder is None:
        return  # the hub's own index is right
    else:
        index = read_json(source, folder / INDEX).get("weight_map")
        weights = sorted(set(map(str, index.values()))) if isinstance(index, dict) else []
        if missing := [name for name in weights if name not in names]:
            yield (
                f"{source!r} lacks {len(missing)} of the {len(weights)} files of weights that its "
                f"index names, {missing[0]} among them; copy or download it again"
            )
            return
    if folder is None:
        return
    if pointers := pointers_in(folder / name for name in weights):
        yield f"{source!r}: {pointer_advice(pointers)}"
        return
    for name in weights:
        if (problem := _cut(folder / name)) is not None:
            yield f"{source!r}: {name} {problem}; copy or download it again"
            return


def _cut(file: Path) -> str | None:
    """Return why a file of weights is not whole, by the header that names its size.

    Source: https://huggingface.co/docs/safetensors (the format)
    """
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            size = file.stat().st_size
            if length > size:
                return "is damaged or cut off"
            header = json.loads(opened.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, IndexError, AttributeError):
        return "can't be read as safetensors"
    whole = 8 + length + max(ends, default=0)
    return None if size >= whole else f"is cut off: it has {size} of {whole} bytes"


def _other_format(names: frozenset[str]) -> str:
    """Return what a model's weights are in place of safetensors, if that is known."""
    for suffix, kind, advice in OTHER_FORMATS:
        if found := sorted(name for name in names if name.endswith(suffix)):
            return f", but {found[0]} ({kind}), which is not served: {advice}"
    if any(name.startswith("consolidated") for name in names):
        return ", but weights in their maker's own format; take those in that of transformers"
    return ""


def _is_known(kind: object) -> bool:
    """Return whether the installed transformers knows a type of models.

    Most types have a folder of their name, and looking for it takes no import.
    """
    name = str(kind).replace("-", "_")
    package = find_spec("transformers")
    places = (package.submodule_search_locations or ()) if package is not None else ()
    if any(Path(place, "models", name, "__init__.py").is_file() for place in places):
        return True
    environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return kind in CONFIG_MAPPING
