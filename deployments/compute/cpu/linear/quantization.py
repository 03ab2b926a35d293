"""`quantization`: which layers of a model become int8 or int4, and which models are refused.

The linear layers of the language model are quantized. So is the layer that computes the logits, but
never to less than int8: its errors go straight into the choice of a token. Embeddings stay, since a
step reads few of their rows. Norms stay too, and so does the vision tower, which runs once per
prompt. If a quantization is configured but can't run, loading fails with the reason; the model is
not served more slowly instead.
"""

import torch
from transformers import PreTrainedModel

from deployments.compute.cpu.linear.prepack import prepack
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.model_shape import QUANTIZED_BITS, SCALED_INPUTS

QUANTIZATIONS = tuple(QUANTIZED_BITS)

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
    # Imported here, as below: a machine that computes on a GPU may lack llvmlite.
    from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle

    if obstacle := quantization_obstacle():
        _refuse(quantization, f"can't run here: {obstacle}")


def quantize_model(model: PreTrainedModel, quantization: str) -> None:
    """Replace the linear layers of a language model by quantized ones.

    Args:
        model: On the CPU.
        quantization: One of `QUANTIZATIONS`.

    Raises:
        UnsupportedModelError: Too few of the model's weights are in linear layers.
    """
    from deployments.compute.cpu.linear.quantized_linear import Int4Linear, Int8Linear

    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call] # left untyped
    fraction = linear_fraction(decoder)
    if fraction < MIN_LINEAR_FRACTION:
        _refuse(
            quantization,
            f"does little for {model.config.model_type} models like this one: of the weights, "
            f"only {fraction:.0%} are in linear layers with a multiple of {SCALED_INPUTS} inputs",
        )
    prepack(decoder, {"int8": Int8Linear, "int4": Int4Linear}[quantization])
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call] # left untyped
    if type(head) is torch.nn.Linear and Int8Linear.fits(head):
        int8_head = Int8Linear(head.weight, head.bias)
        model.set_output_embeddings(int8_head)  # type: ignore[no-untyped-call] # left untyped


def linear_fraction(decoder: torch.nn.Module) -> float:
    """Return which fraction of a language model's weights, without embeddings, is quantized."""
    modules = list(decoder.modules())
    looked_up = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Embedding))
    linears = [m for m in modules if type(m) is torch.nn.Linear]
    linear = sum(m.weight.numel() for m in linears if m.in_features % SCALED_INPUTS == 0)
    return linear / (sum(p.numel() for p in decoder.parameters()) - looked_up)


def _refuse(quantization: str, why: str) -> None:
    raise UnsupportedModelError(f"quantization {quantization!r} {why}; write `quantization: null`")
