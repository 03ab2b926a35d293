"""`quantization: int8`: which layers of a model become int8, and which models are refused.

The linear layers of the language model become int8, and so does the layer that computes the logits.
Embeddings stay, since a step reads few of their rows. Norms stay too, and so does the vision tower,
which runs once per prompt. If int8 is configured but can't run, loading fails with the reason; the
model is not served more slowly instead.
"""

import torch
from transformers import PreTrainedModel

from deployments.compute.cpu.linear.int8_linear import Int8Linear, int8_obstacle
from deployments.compute.cpu.linear.prepack import prepack
from deployments.compute.errors import UnsupportedModelError

QUANTIZATIONS = ("int8",)

MIN_LINEAR_FRACTION = 0.5
"""Fraction of the language model's weights, without embeddings, that must be in linear layers. Most
mixtures of experts and GPT-2 keep their weights elsewhere."""


def check_quantization(quantization: str | None, device: torch.device) -> None:
    """Refuse a quantization that can't run here, before any weight is read.

    Raises:
        UnsupportedModelError: The quantization can't run; the message says why.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        _refuse(quantization, f"is unknown; known: {', '.join(QUANTIZATIONS)}")
    if device.type != "cpu":
        _refuse(quantization, f"runs only on a CPU, and the device is {device.type}")
    if obstacle := int8_obstacle():
        _refuse(quantization, f"can't run here: {obstacle}")


def quantize_model(model: PreTrainedModel) -> None:
    """Replace the linear layers of a language model by int8 layers.

    Raises:
        UnsupportedModelError: Too few of the model's weights are in linear layers.
    """
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call] # left untyped
    fraction = linear_fraction(decoder)
    if fraction < MIN_LINEAR_FRACTION:
        _refuse(
            "int8",
            f"does little for {model.config.model_type} models like this one: of the weights, "
            f"only {fraction:.0%} are in linear layers",
        )
    prepack(decoder, Int8Linear)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call] # left untyped
    if type(head) is torch.nn.Linear:
        int8_head = Int8Linear(head.weight, head.bias)
        model.set_output_embeddings(int8_head)  # type: ignore[no-untyped-call] # left untyped


def is_quantized(model: torch.nn.Module) -> bool:
    """Return whether any layer is int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def linear_fraction(decoder: torch.nn.Module) -> float:
    """Return the fraction of a language model's weights, without embeddings, in linear layers."""
    modules = list(decoder.modules())
    looked_up = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Embedding))
    linear = sum(m.weight.numel() for m in modules if type(m) is torch.nn.Linear)
    return linear / (sum(p.numel() for p in decoder.parameters()) - looked_up)


def _refuse(quantization: str, why: str) -> None:
    raise UnsupportedModelError(f"quantization {quantization!r} {why}; write `quantization: null`")
