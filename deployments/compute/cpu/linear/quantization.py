"""`quantization: int8`: which of a model's layers are held as int8, and who is refused it.

The linear layers of the language model are, and the one that makes the logits. Embeddings stay as
they are, since of them a step reads few rows; so do norms, and what looks at images, which runs
once a prompt. Who asks for int8 and can't have it is told why, and not served more slowly.
"""

import torch
from transformers import PreTrainedModel

from deployments.engine.cpu.int8_linear import Int8Linear, int8_obstacle
from deployments.engine.cpu.prepack import prepack
from deployments.engine.model_check import UnsupportedModelError

QUANTIZATIONS = ("int8",)

LEAST_SHARE = 0.5
"""Of the language model's weights, embeddings apart, that must be in linear layers: those of most
mixtures of experts and of GPT-2 are not."""


def check_quantization(quantization: str | None, device: torch.device) -> None:
    """Refuse what can be told to fail before any weight is read.

    Raises:
        UnsupportedModelError: Says what stands in the way.
    """
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        _refuse(quantization, f"is unknown; known: {', '.join(QUANTIZATIONS)}")
    if device.type != "cpu":
        _refuse(quantization, f"runs on a CPU alone, and the device is {device.type}")
    if obstacle := int8_obstacle():
        _refuse(quantization, f"can't run here: {obstacle}")


def quantize_model(model: PreTrainedModel) -> None:
    """Put int8 layers in the place of a model's linear layers.

    Raises:
        UnsupportedModelError: Most of the model's weights are not in linear layers.
    """
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call] # left untyped
    share = linear_share(decoder)
    if share < LEAST_SHARE:
        _refuse(
            "int8",
            f"does little for {model.config.model_type} models like this one: of the weights, "
            f"only {share:.0%} are in linear layers",
        )
    prepack(decoder, Int8Linear)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call] # left untyped
    if type(head) is torch.nn.Linear:
        int8_head = Int8Linear(head.weight, head.bias)
        model.set_output_embeddings(int8_head)  # type: ignore[no-untyped-call] # left untyped


def is_quantized(model: torch.nn.Module) -> bool:
    """Return whether any layer is held as int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def linear_share(decoder: torch.nn.Module) -> float:
    """Return the part of a language model's weights, embeddings apart, in linear layers."""
    modules = list(decoder.modules())
    looked_up = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Embedding))
    linear = sum(m.weight.numel() for m in modules if type(m) is torch.nn.Linear)
    return linear / (sum(p.numel() for p in decoder.parameters()) - looked_up)


def _refuse(quantization: str, why: str) -> None:
    raise UnsupportedModelError(f"quantization {quantization!r} {why}; write `quantization: null`")
