"""From a folder or a hub repository to a model that the engine can run.

Loads safetensors only and no remote code. What the engine can't serve is refused before any weight
is read, if the configuration tells it (`deployments.engine.model_check`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from deployments.engine.attention import ATTENTION_NAME, register_attention
from deployments.engine.cpu.prepack import num_weight_bytes, prepack
from deployments.engine.cpu.quantization import check_quantization, quantize_model
from deployments.engine.model_check import (
    UnsupportedModelError,
    check_class,
    check_config,
    check_positions,
    has_images,
)

LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)
"""What broken or missing files, shapes that don't fit and missing packages raise."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what turns requests into its inputs.

    Attributes:
        model: In evaluation mode, on its device, attending over slots.
        tokenizer: With the chat template, if the model has one.
        processor: Prepares images together with text; None for a model without images.
        eos_token_ids: What ends a text, by the model's generation configuration.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: ProcessorMixin | None
    eos_token_ids: frozenset[int]

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the language model."""
        config: PreTrainedConfig = self.model.config.get_text_config()
        return config

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights in memory, tied ones counted once unless one was laid out anew."""
        return num_weight_bytes(self.model)


def load_model(
    source: str,
    *,
    revision: str | None,
    dtype: str,
    device: torch.device,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a model for the engine.

    Args:
        source: A folder, or the id of a hub repository.
        revision: A commit of the hub repository.
        dtype: auto, float32, bfloat16 or float16.
        device: Where the model will run.
        quantization: int8, for linear layers on a CPU, or None.

    Raises:
        UnsupportedModelError: The files are missing, or the engine lacks a feature of the model.
    """
    check_quantization(quantization, device)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    if Path(source).is_absolute() and not Path(source).is_dir():
        raise UnsupportedModelError(f"can't load {source!r}: there is no such folder")
    with told_in_one_line(source):
        config = AutoConfig.from_pretrained(source, **options)
        check_config(config)
        model = _load_weights(source, config, choose_dtype(config, dtype, device), device, options)
        tokenizer, processor = _load_text_side(source, config, options)
    prepare_model(model, quantization)
    return LoadedModel(model, tokenizer, processor, _eos_token_ids(model, tokenizer))


@contextmanager
def told_in_one_line(source: str) -> Iterator[None]:
    """Load what belongs to a model, and say in one line why it can't be.

    Raises:
        UnsupportedModelError: Something is missing or broken, or was refused by the block itself.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except LOAD_ERRORS as error:
        summary = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModelError(f"can't load {source!r}: {summary}") from error


def require_all_weights(source: str, missing_keys: Iterable[str], advice: str = "") -> None:
    """Refuse a model some of whose weights would be random.

    Raises:
        UnsupportedModelError: There are such weights; the advice ends the message.
    """
    missing = sorted(missing_keys)
    if missing:
        raise UnsupportedModelError(
            f"can't load {source!r}: it lacks {len(missing)} weights, {missing[0]} among them"
            + advice
        )


def require_tokenizer_files(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that transformers has made of nothing.

    Raises:
        UnsupportedModelError: It knows special tokens alone.
    """
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UnsupportedModelError(f"can't load {source!r}: it has no tokenizer files")


def choose_dtype(config: PreTrainedConfig, dtype: str, device: torch.device) -> torch.dtype:
    """Return the weights' type on the device.

    `auto` keeps the files' type, but on a CPU that multiplies only float32 in hardware it is
    float32, and so it is wherever a CPU would have to run float16.
    """
    if dtype != "auto":
        chosen = getattr(torch, dtype)
        assert isinstance(chosen, torch.dtype)
        return chosen
    stored = config.get_text_config().dtype or torch.float32
    if isinstance(stored, str):
        stored = getattr(torch, stored)
    assert isinstance(stored, torch.dtype)
    has_bf16 = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    if device.type == "cpu" and (stored == torch.float16 or not has_bf16):
        return torch.float32
    return stored


def prepare_model(model: PreTrainedModel, quantization: str | None = None) -> None:
    """Set a model to evaluation and to attention over slots, its language model alone.

    On a CPU, its weights are laid out for the kernels there; as int8, if that is asked for.

    Raises:
        UnsupportedModelError: The model can't be told where its tokens belong, or not be quantised.
    """
    check_quantization(quantization, model.device)
    check_class(model)
    model.train(mode=False).requires_grad_(requires_grad=False)
    check_positions(model)
    register_attention()
    is_composite = model.config.get_text_config() is not model.config
    model.set_attn_implementation(
        {"text_config": ATTENTION_NAME} if is_composite else ATTENTION_NAME
    )
    if quantization is not None:
        quantize_model(model)
    if model.device.type == "cpu":
        prepack(model)


def _load_weights(
    source: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
) -> PreTrainedModel:
    auto = AutoModelForImageTextToText if has_images(config) else AutoModelForCausalLM
    loaded: Any = auto.from_pretrained(  # a pair, of which transformers' types know nothing
        source,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    model: PreTrainedModel = loaded[0]
    require_all_weights(source, loaded[1]["missing_keys"])
    torch.nn.Module.to(model, device)
    return model


def _load_text_side(
    source: str, config: PreTrainedConfig, options: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase, ProcessorMixin | None]:
    if has_images(config):
        processor = AutoProcessor.from_pretrained(source, **options)  # type: ignore[no-untyped-call] # transformers leaves it untyped
        return processor.tokenizer, processor
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    require_tokenizer_files(source, tokenizer)
    return tokenizer, None


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    named = model.generation_config.eos_token_id if model.generation_config else None
    if named is None:
        named = tokenizer.eos_token_id
    if named is None:
        return frozenset()
    return frozenset(named if isinstance(named, list) else [named])
