import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from deployments.compute.cpu.linear.packed_embedding import MIN_TABLE_BYTES
from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle
from deployments.compute.cpu.linear.stored_weights import StoredWeights, weight_memory
from deployments.engine.model.loader import prepare_model
from deployments.plan import cache_folder


def model(quantization: str | None = None, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a prepared model whose layers are large enough to give back."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    made = Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **changes}))
    prepare_model(made, quantization)
    return made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "raystream"


def contents(held: PreTrainedModel) -> list[bytes]:
    return [bytes(each.content) for each in weight_memory(held)]


def are_zero(held: PreTrainedModel) -> bool:
    """Return whether the pages are zero that each weight has for itself."""
    inner = (each[mmap.PAGESIZE : -mmap.PAGESIZE] for each in contents(held))
    return not any(any(each) for each in inner)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@torch.inference_mode()
def test_weights_that_were_given_back_are_filled_again_in_place(
    quantization: str | None, folder: Path
) -> None:
    if quantization is not None and (obstacle := quantization_obstacle()):
        pytest.skip(obstacle)
    held, rows = model(quantization), torch.ones(3, 256)
    layer = held.get_submodule("model.layers.1.mlp")
    expected, before, where = layer(rows), contents(held), weight_memory(held)
    weights = StoredWeights(held)
    for _ in range(2):
        weights.give_back()
        assert weights.is_given_back
        assert are_zero(held)
        weights.fill()
        assert not weights.is_given_back
        assert weight_memory(held) == where
        assert contents(held) == before
        assert torch.equal(layer(rows), expected)
    assert not any(each.is_file() for each in folder.iterdir())  # the file has no name


def test_a_model_whose_weights_are_all_too_small_to_give_back_sleeps_too() -> None:
    held = torch.nn.Linear(8, 8)
    rows = torch.ones(3, 8)
    expected, weights = held(rows), StoredWeights(held)
    assert not weight_memory(held)
    for _ in range(2):
        weights.give_back()
        assert weights.is_given_back
        weights.fill()
        assert not weights.is_given_back
        assert torch.equal(held(rows), expected)


def test_a_table_that_is_looked_up_in_the_packed_layer_is_there_once() -> None:
    tied = model(vocab_size=MIN_TABLE_BYTES // 1024, tie_word_embeddings=True)
    where = weight_memory(tied)
    assert len({each.address for each in where}) == len(where)
    assert sum(each.num_bytes >= MIN_TABLE_BYTES for each in where) == 1


def test_a_call_that_moves_a_part_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MAX_CALL_BYTES", 100_003)
    held = model()
    before, weights = contents(held), StoredWeights(held)
    weights.give_back()
    weights.fill()
    assert contents(held) == before


def test_a_disk_without_room_leaves_the_weights_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, num_bytes: int) -> None:
        assert num_bytes >= sum(map(len, before))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    held = model()
    before, weights = contents(held), StoredWeights(held)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        weights.give_back()
    assert not weights.is_given_back
    assert contents(held) == before
    monkeypatch.undo()
    weights.give_back()
    assert weights.is_given_back


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_weights_stay_in_memory_if_their_file_would_lie_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 27 0:999999 / /proc rw,relatime - proc proc rw\n"
        f"27 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} none rw\n"
    )
    monkeypatch.setattr(cache_folder, "MOUNTS", mounts)
    held = model()
    before, weights = contents(held), StoredWeights(held)
    if kind in cache_folder.IN_MEMORY:
        with pytest.raises(OSError, match=r"lie in memory.*XDG_CACHE_HOME"):
            weights.give_back()
        assert contents(held) == before
    else:
        weights.give_back()
    assert weights.is_given_back == (kind == "ext4")


def test_a_system_that_does_not_tell_its_file_systems_is_taken_to_have_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "MOUNTS", tmp_path / "missing")
    assert not cache_folder.is_in_memory(tmp_path)


def test_a_file_that_has_ended_fills_nothing_silently() -> None:
    weights = StoredWeights(model())
    weights.give_back()
    assert weights._file is not None
    os.ftruncate(weights._file.fileno(), 1000)
    with pytest.raises(OSError, match="ended too early"):
        weights.fill()
    assert weights.is_given_back
