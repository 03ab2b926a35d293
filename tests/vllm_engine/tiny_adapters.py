"""Random LoRA adapters, as peft saves them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from deployments.vllm_engine.adapters import CONFIG_FILE, WEIGHT_FILE

RANK, ALPHA = 4, 8


def save_adapter(
    folder: Path, seed: int, modules: tuple[str, ...], layers: nn.ModuleList, scale: float = 1.0
) -> Path:
    """Save an adapter of these modules of each layer; `scale` is that of its weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for i, layer in enumerate(layers):
        for name in modules:
            linear = layer.get_submodule(f"self_attn.{name}")
            assert isinstance(linear, nn.Linear)
            place = f"base_model.model.model.layers.{i}.self_attn.{name}"
            low = torch.randn(RANK, linear.in_features, generator=generator)
            high = torch.randn(linear.out_features, RANK, generator=generator)
            weights[f"{place}.lora_A.weight"] = low * scale
            weights[f"{place}.lora_B.weight"] = high * scale
    folder.mkdir()
    save_file(weights, folder / WEIGHT_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder
