"""Loads what every model has, and checks it: configuration, weights, tokenizer, dtype.

An error is one line that says what to do.
"""

import errno
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    core_model_loading,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.quantization_config import Mxfp4Config

from deployments.compute.device_errors import OUT_OF_MEMORY_SIGNS, is_out_of_memory
from deployments.contract.unsupported_model import (
    UnsupportedModelError,
    pointer_advice,
    pointers_in,
    reason_of,
)
from deployments.plan.checkpoint import DEQUANTIZED, check_checkpoint
from deployments.plan.model_shape import choose_dtype_name, stored_dtype
from deployments.plan.processor import has_bfloat16

SETTINGS: Final = frozenset({".json", ".jinja", ".model", ".txt"})
"""How the names of the small files end that a model is loaded by. Some of them may be missing, so a
damaged one would be passed over in silence.
"""

CONVERSION_FAILURE: Final = re.compile(
    r"\bCONVERSION\b[\s\S]*?^(?P<why>\S.*)\nError: (?P<what>.+)$", re.MULTILINE
)
"""Why weights could not be converted, in the report that transformers logs.

Source: transformers.core_model_loading.log_conversion_errors
"""


@contextmanager
def wrap_load_errors(
    source: str, part: str = "", config: PreTrainedConfig | None = None
) -> Iterator[None]:
    """Raise load errors of the block as an `UnsupportedModelError`: a line that says what to do.

    What transformers raises for a wrong file may be of any class.

    Args:
        source: A folder, or the id of a hub repository.
        part: What the block reads, such as "its tokenizer".
        config: The model's configuration, if it was read before.

    Raises:
        UnsupportedModelError: A file is missing or broken, or the block raised this error itself.
        RuntimeError: Memory ran out, so the files may be right; see `is_out_of_memory`.
    """
    failures = _ConversionFailures()
    reporter = logging.getLogger(PreTrainedModel.__module__)
    reporter.addFilter(failures.note)
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if any(sign in failures.advice for sign in OUT_OF_MEMORY_SIGNS):
            raise MemoryError(failures.advice) from error
        advice = failures.advice or _advice(source, part, error, config)
        raise UnsupportedModelError(f"can't load {source!r}: {advice}") from error
    finally:
        reporter.removeFilter(failures.note)


class _ConversionFailures:
    """Takes from transformers' report why weights could not be converted.

    Its error only points to the report, a table for the terminal with a traceback in it.
    """

    advice = ""
    """Why, in one line; empty if all could be converted."""

    def note(self, record: logging.LogRecord) -> bool:
        """Note what a record says of it, and return whether it says something else."""
        found = CONVERSION_FAILURE.search(record.getMessage())
        if found is None:
            return True
        self.advice = f"its weights don't fit together: {found['why']} ({found['what']})"
        return False


def read_config(source: str, *, revision: str | None) -> PreTrainedConfig:
    """Read a model's config.json, without what it says about kernels.

    A file may name the kernels that its author used (`attn_implementation`,
    `experts_implementation`), which may not be installed here. They change no answer, and each
    engine chooses its own.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.

    Raises:
        UnsupportedModelError: It is missing or broken, a file beside it is a git-lfs pointer, or
            `check_checkpoint` refuses the files.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    with wrap_load_errors(source, "its config.json"):
        folder = Path(source)
        if folder.is_absolute() and not folder.is_dir():
            raise UnsupportedModelError(f"can't load {source!r}: there is no such folder")
        settings = folder.iterdir() if folder.is_dir() else ()
        if pointers := pointers_in(file for file in settings if file.suffix in SETTINGS):
            raise UnsupportedModelError(f"can't load {source!r}: {pointer_advice(pointers)}")
        check_checkpoint(source, revision)
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(source, **options)
        except (AttributeError, ValueError) as error:
            written, _ = PreTrainedConfig.get_config_dict(source, **options)
            _explain(source, written)
            raise error from None
        config._attn_implementation = None  # sets it in each part of the configuration
        config._experts_implementation = None
        for part in (config, config.get_text_config()):
            if not getattr(part, "quantization_config", True):  # it is there, and says nothing
                del part.quantization_config
    return config


def read_settings(source: str, *, revision: str | None) -> Mapping[str, Any]:
    """Return what a model's config.json says, also of kinds of models that transformers lacks.

    What is said of the language model alone (`text_config`) comes before the rest.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.

    Raises:
        UnsupportedModelError: It is missing or broken.
    """
    with wrap_load_errors(source, "its config.json"):
        written, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
    return {**written, **(written.get("text_config") or {})}


def read_generation(source: str, *, revision: str | None) -> GenerationConfig | None:
    """Return what a model's generation_config.json says; None if there is no such file.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        return GenerationConfig.from_pretrained(source, **options)
    except OSError:
        return None


def _explain(source: str, written: Mapping[str, Any]) -> None:
    """Refuse a configuration that transformers can't read, if we can say it better.

    Raises:
        UnsupportedModelError: The kind of the model, or its labels, are at fault.
    """
    kind = written.get("model_type")
    if "auto_map" in written and kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"can't load {source!r}: the model needs code of its own, which its config.json names "
            "as auto_map; code of models is never run here"
        )
    if "model_type" in written and kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"can't load {source!r}: its config.json sets model_type to {kind!r}, which "
            f"transformers {transformers.__version__} does not know"
        )
    if written.get("id2label") is not None:
        read_labels(source, written["id2label"])


def read_labels(source: str, id2label: Any) -> tuple[str, ...]:
    """Return the names of a classifier's labels, in the order of the model's outputs.

    A number becomes its digits, and a label without a name gets the one that transformers would
    give it.

    Args:
        source: The model, for the message.
        id2label: The names by output, as config.json or transformers' configuration has them.

    Raises:
        UnsupportedModelError: It does not name exactly the outputs 0, 1, 2, ...
    """
    problem = "is no mapping" if not isinstance(id2label, Mapping) else "is empty"
    if isinstance(id2label, Mapping) and id2label:
        names = {str(key): _label(key, name) for key, name in id2label.items()}
        outputs = [str(output) for output in range(len(id2label))]
        missing = next((output for output in outputs if output not in names), None)
        if missing is not None:
            problem = f"has {len(id2label)} entries, but none for the output {missing}"
        elif None in names.values():
            problem = "has a list or a mapping in place of a name"
        else:
            return tuple(str(names[output]) for output in outputs)
    raise UnsupportedModelError(
        f"can't load {source!r}: id2label in its config.json {problem}; write it as "
        '{"0": "a name", "1": "another", ...}, an entry for each output of the model'
    )


def _label(output: Any, name: Any) -> str | None:
    """Return a label's name; None if it is none."""
    if isinstance(name, str):
        return name
    if name is None:
        return f"LABEL_{output}"
    return json.dumps(name) if isinstance(name, int | float) else None


def _advice(source: str, part: str, error: Exception, config: PreTrainedConfig | None) -> str:
    reason = reason_of(error)
    if _has_number(error, errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space, or set HF_HOME to a folder on another disk"
    if Path(source).is_dir() and (pointers := pointers_in(Path(source).rglob("*.safetensors"))):
        return pointer_advice(pointers)
    if isinstance(error, SafetensorError):
        return f"its weights are damaged ({error}); copy or download them again"
    if isinstance(error, OSError) and not Path(source).is_dir():
        if _has_number(error, errno.EACCES, errno.EPERM, errno.EROFS):
            return (
                f"downloads need a folder that this user can write; set HF_HOME to one ({reason})"
            )
        return (
            "there is no such folder, and no repository of this name was found: "
            f"{reason.rstrip('.')}; check `source` in the model's entry"
        )
    if isinstance(error, KeyError) and error.args and config is not None:
        for place in _places_of(error.args[0], config.to_dict()):
            return (
                f"its config.json sets {place} to {error.args[0]!r}, which transformers "
                f"{transformers.__version__} does not know"
            )
    return f"{part} can't be read: {reason}" if part else reason


def _places_of(value: Any, section: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the keys of a configuration that have this value."""
    for key, found in section.items():
        if isinstance(found, Mapping):
            yield from _places_of(value, found, f"{path}{key}.")
        elif isinstance(value, str) and found == value:
            yield f"{path}{key}"


def _has_number(error: BaseException | None, *numbers: int) -> bool:
    """Return whether an error, or one that led to it, is the system's with one of these numbers."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in numbers:
            return True
        error = error.__cause__ or error.__context__
    return False


def load_weights(
    auto: Any,
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    revision: str | None,
    device: torch.device,
    *,
    advice: str = "",
    optional: str = "",
) -> PreTrainedModel:
    """Load a model with its weights, all of which must be in its files, onto a device.

    Args:
        auto: The class of transformers that finds the model's own, such as `AutoModel`.
        source: A folder, or the id of a hub repository.
        config: The model's configuration.
        dtype: The type of the weights.
        revision: A commit of the hub repository.
        device: Where the model will run.
        advice: How the message about missing weights ends.
        optional: Weights whose names begin so may be missing; empty if none may.

    Raises:
        UnsupportedModelError: Weights are missing, or don't fit.
        Exception: What transformers raises; see `wrap_load_errors`.
    """
    model: PreTrainedModel
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    dequantizing: dict[str, Any] = {}
    if method is not None:
        assert method in DEQUANTIZED, "`check_checkpoint` has refused all others"
        dequantizing["quantization_config"] = Mxfp4Config(dequantize=True)
    with _reading_onto(device):
        model, info = auto.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            revision=revision,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            # Otherwise the error about weights of other shapes points to a table in the log.
            ignore_mismatched_sizes=True,
            **dequantizing,
        )
    _require_all_weights(source, info, advice, optional)
    torch.nn.Module.to(model, device)  # what no file holds, such as rotary frequencies
    return model


@contextmanager
def _reading_onto(device: torch.device) -> Iterator[None]:
    """Have transformers put each weight on the device when it is read, and cast it there.

    So the host holds no copy of the model: files are mapped into memory. `device_map` places the
    weights, too, but needs accelerate, and torch casts on the host what it copies to a GPU in
    another dtype.
    """
    if device.type == "cpu":
        yield
        return
    materialize, target = core_model_loading._materialize_copy, device

    def place(tensor: torch.Tensor, device: Any = None, dtype: Any = None) -> torch.Tensor:
        placed = tensor[...].to(target)
        return placed if dtype is None else placed.to(dtype)

    core_model_loading._materialize_copy = place
    try:
        yield
    finally:
        core_model_loading._materialize_copy = materialize


def _require_all_weights(source: str, info: Mapping[str, Any], advice: str, optional: str) -> None:
    """Refuse a model some of whose weights transformers has initialised at random."""
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise UnsupportedModelError(
            f"can't load {source!r}: {len(info['mismatched_keys'])} of its weights have other "
            f"shapes than its config.json says: {name} is {_shape(stored)} in the files and "
            f"{_shape(expected)} by config.json; both must come from the same model"
        )
    missing = sorted(
        name for name in info["missing_keys"] if not (optional and name.startswith(optional))
    )
    if missing:
        raise UnsupportedModelError(
            f"can't load {source!r}: it lacks {len(missing)} weights, {missing[0]} among them"
            + advice
        )


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def choose_dtype(config: PreTrainedConfig, dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights on the device; see `choose_dtype_name`."""
    on_cpu = device.type == "cpu"
    has_bf16 = on_cpu and has_bfloat16()
    chosen = choose_dtype_name(stored_dtype(config), dtype, on_cpu=on_cpu, has_bf16=has_bf16)
    found = getattr(torch, chosen)
    assert isinstance(found, torch.dtype)
    return found
