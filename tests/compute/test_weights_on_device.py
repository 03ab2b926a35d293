"""Weights go from the file to the device, with `meta` in place of a GPU."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    core_model_loading,
)

from deployments.compute import model_files
from deployments.compute.device_errors import is_out_of_memory
from deployments.compute.model_files import load_weights, wrap_load_errors

CPU, META = torch.device("cpu"), torch.device("meta")
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SMALL_BYTES = 64 * 64  # less than any matrix has; rotary frequencies and norms have fewer


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Notes the largest tensor that is made on the host, and the most that the device held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.host_bytes = 0
        self.device_bytes = self.most_device_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in given:
            # transformers makes the model without weights on `meta` first, by factory functions.
            is_copy = any(isinstance(each, torch.Tensor) for each in tree_leaves(args))
            self._note(made.untyped_storage(), made.device, is_copy=is_copy)
        return made

    def _note(self, storage: torch.UntypedStorage, device: torch.device, *, is_copy: bool) -> None:
        num_bytes = storage.nbytes()
        if device.type == "cpu":
            self.host_bytes = max(self.host_bytes, num_bytes)
        if device.type == "cpu" or not is_copy:
            return
        self.device_bytes += num_bytes
        self.most_device_bytes = max(self.most_device_bytes, self.device_bytes)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self.device_bytes -= num_bytes


MODELS: list[tuple[Callable[[Any], PreTrainedModel], PreTrainedConfig]] = [
    (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    # Its experts are joined while it is loaded.
    (Qwen2MoeForCausalLM, Qwen2MoeConfig(**SIZES, **EXPERTS)),
]


@pytest.fixture(params=MODELS, ids=["plain", "tied", "experts"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make, config = request.param
    make(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    config = model_files.read_config(str(folder), revision=None)
    return load_weights(AutoModelForCausalLM, str(folder), config, dtype, None, device)


def load_and_watch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[PreTrainedModel, Allocations]:
    """Load float32 weights in bfloat16 onto the device, and watch what is allocated."""
    # Otherwise threads read the files, which a dispatch mode does not see.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with Allocations() as allocations:
        model = load(folder, torch.bfloat16, META)
    return model, allocations


def test_no_weight_is_copied_or_cast_on_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, allocations = load_and_watch(folder, monkeypatch)
    assert allocations.host_bytes < SMALL_BYTES
    assert {each.device for each in (*model.parameters(), *model.buffers())} == {META}
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_a_copy_on_the_host_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_reading_onto", nullcontext)
    _, allocations = load_and_watch(folder, monkeypatch)
    assert allocations.host_bytes >= SMALL_BYTES


def most_while_loading(model: PreTrainedModel) -> int:
    """Return the bytes of a model, and of the largest weight in float32 or of a layer's experts."""
    weights = {each.data_ptr() or id(each): each for each in model.parameters()}.values()
    sizes = [each.numel() * 2 for each in weights]
    return sum(sizes) + 2 * max(sizes) + SMALL_BYTES


def test_the_device_never_holds_two_copies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, allocations = load_and_watch(folder, monkeypatch)
    assert allocations.device_bytes > 0
    assert allocations.most_device_bytes <= most_while_loading(model)


def test_a_second_copy_on_the_device_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, kept = torch.Tensor.to, list[torch.Tensor]()

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        kept.append(right(tensor, *arguments, **options))
        return kept[-1]

    monkeypatch.setattr(torch.Tensor, "to", to)
    model, allocations = load_and_watch(folder, monkeypatch)
    assert allocations.most_device_bytes > most_while_loading(model)


def test_each_weight_is_placed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = list[torch.Tensor]()
    right = torch.nn.Module.to

    def note(model: torch.nn.Module, *arguments: Any) -> torch.nn.Module:
        placed.extend(each for each in model.parameters() if each.device != META)
        return right(model, *arguments)

    monkeypatch.setattr(torch.nn.Module, "to", note)
    load(folder, torch.bfloat16, META)
    assert placed == []  # what is moved as a whole has no weights left


def test_what_is_placed_are_the_weights_of_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(folder, torch.bfloat16, CPU).state_dict()
    right, devices = torch.Tensor.to, list[Any]()

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        devices.extend(each for each in arguments if each == META)
        placed: Any = [CPU if each == META else each for each in arguments]
        return right(tensor, *placed, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    found = load(folder, torch.bfloat16, META).state_dict()
    assert len(devices) > len(expected) // 2
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_memory_that_runs_out_on_the_device_is_told_as_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "stack", run_out)  # what joins experts
        patched.setattr(torch.Tensor, "to", run_out)
        with pytest.raises((RuntimeError, MemoryError)) as raised, wrap_load_errors(str(folder)):
            load(folder, torch.bfloat16, META)
    assert is_out_of_memory(raised.value)
    assert core_model_loading._materialize_copy.__module__ == core_model_loading.__name__
