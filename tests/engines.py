"""Tests of what is the same with both engines: each runs in raystream's environment and in vLLM's.

The fixture `engine_name` names the engine. Its half with vLLM has the mark `vllm`, and runs by

    .venv-vllm/bin/python -m pytest -p tests.vllm_engine.beside -m 'vllm and not processes' FILES

where FILES are those that `tests.vllm_engine.neutral_table` finds; `make test-vllm` does so.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest
from safetensors.torch import load_file, save_file

ROOT: Final = Path(__file__).resolve().parents[1]
EngineName = Literal["raystream", "vllm"]
T = TypeVar("T", bound=Callable[..., Any])

SMALL_VLLM: Final[Mapping[str, Any]] = {
    "engine": "vllm",
    "engine_args": {"enforce_eager": True},
    "kv_cache_memory_bytes": 2**26,
}
"""What makes vLLM start fast, and small: keys of a model's entry."""


@pytest.fixture(scope="session", params=["raystream", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine_name(request: pytest.FixtureRequest) -> EngineName:
    """Return the engine under test."""
    name: EngineName = request.param
    return name


def only_raystream(why: str) -> Callable[[T], T]:
    """Run a test of both engines only with raystream's; docs/vllm.md says why."""
    assert why
    return pytest.mark.parametrize("engine_name", ["raystream"], indirect=True)


def keys_of(engine: EngineName) -> dict[str, Any]:
    """Return the keys of a model's entry that choose the engine."""
    return dict(SMALL_VLLM) if engine == "vllm" else {}


def chat_model(engine: EngineName, folder: Path) -> Path:
    """Return pydoc-chat: for vLLM a copy in this folder, without images.

    vLLM's class for it would need a newline in the vocabulary, and torchvision.
    """
    source = ROOT / "models/pydoc-chat"
    return source if engine == "raystream" else without_images(source, folder)


def without_images(source: Path, folder: Path) -> Path:
    """Copy a Gemma 3 without what reads images; its texts are the same."""
    kept = shutil.ignore_patterns(
        "*.jsonl", "processor_config.json", "README.md", "evaluation.json"
    )
    copy = shutil.copytree(source, folder / source.name, ignore=kept)
    whole = json.loads((copy / "config.json").read_text())
    text = {**whole["text_config"], "architectures": ["Gemma3ForCausalLM"], "dtype": whole["dtype"]}
    (copy / "config.json").write_text(json.dumps(text))
    prefix = "language_model."
    weights = load_file(copy / "model.safetensors")
    texts = {
        name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
    }
    save_file(texts, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def shallow(source: Path, folder: Path) -> Path:
    """Copy a Gemma 3 with its first two layers only, one of each kind of attention.

    Its texts mean nothing, and it takes a third of the time.
    """
    kinds = ["sliding_attention", "full_attention"]
    copy = shutil.copytree(source, folder / f"shallow-{source.name}")
    config = json.loads((copy / "config.json").read_text())
    config.get("text_config", config).update(num_hidden_layers=len(kinds), layer_types=kinds)
    (copy / "config.json").write_text(json.dumps(config))
    weights = load_file(copy / "model.safetensors")
    for name in [*weights]:
        layer = re.match(r"(?:language_model\.)?model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= len(kinds):
            del weights[name]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
