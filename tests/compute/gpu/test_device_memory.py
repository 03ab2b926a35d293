"""A device's memory that is given back; the CPU's storages are resized as a GPU's are."""

import errno
import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.compute.card_room import wait_for_room
from deployments.compute.gpu import device_memory
from deployments.compute.gpu.device_memory import (
    CHUNK_BYTES,
    SPARE_BYTES,
    DeviceMemory,
    DeviceWeights,
    PinnedCopy,
    pinned_block,
    store,
)
from deployments.plan import cgroup
from tests.failing import failing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files, which is not there yet; there is room in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 2 * SPARE_BYTES)
    return tmp_path / "raystream"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", 100)


class Tied(torch.nn.Module):
    """A module with a table that two names share, a view of a weight, and a buffer of numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(9, 7)
        self.head = torch.nn.Linear(7, 9, bias=False)
        self.head.weight = self.table.weight
        self.scale = torch.nn.Parameter(torch.randn(61, dtype=torch.bfloat16))
        self.register_buffer("part", self.scale.detach()[3:8])
        self.register_buffer("numbers", torch.arange(5))

    def contents(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in (*self.parameters(), *self.buffers())]

    @property
    def held_bytes(self) -> int:
        tensors = (*self.parameters(), *self.buffers())
        return sum(each.untyped_storage().nbytes() for each in tensors)


NUM_BYTES = 9 * 7 * 4 + 61 * 2 + 5 * 8


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 252, CHUNK_BYTES])
def test_weights_come_back_to_all_that_holds_them(
    level: int, chunk_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", chunk_bytes)
    if level == 2:
        monkeypatch.setattr(cgroup, "available_bytes", lambda: NUM_BYTES + SPARE_BYTES - 1)
    model = Tied()
    view, before = model.scale.detach()[3:8], model.contents()
    weights = DeviceWeights(model, CPU)
    assert weights.level is None
    for _ in range(2):
        weights.give_back()
        assert weights.is_given_back
        assert weights.level == level
        assert model.held_bytes == 0
        weights.fill()
        weights.fill()
        assert not weights.is_given_back
        assert are_equal(model.contents(), before)
        assert torch.equal(view, model.part)
    assert model.head.weight is model.table.weight
    assert folder.exists() == (level == 2)
    assert not folder.exists() or not [*folder.iterdir()]  # the file has no name


def test_each_storage_counts_once_and_what_lies_elsewhere_stays() -> None:
    model = Tied()
    foreign = torch.frombuffer(bytearray(16), dtype=torch.uint8)  # torch did not allocate it
    tensors = [*model.parameters(), *model.buffers(), foreign, torch.empty(5, device="meta")]
    memory = DeviceMemory(tensors, CPU)
    assert memory.num_bytes == NUM_BYTES
    memory.give_back()
    assert memory.num_bytes == NUM_BYTES
    assert foreign.tolist() == [0] * 16
    memory.take_back()
    assert model.held_bytes == NUM_BYTES + 61 * 2  # the storage of the view, seen twice


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_memory_is_waited_for_whatever_says_that_there_is_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory([torch.zeros(8)], CPU)
    memory.give_back()
    resize, refusals = torch.UntypedStorage.resize_, [error, error]

    def resize_late(storage: torch.UntypedStorage, num_bytes: int) -> None:
        if refusals:
            raise refusals.pop()
        resize(storage, num_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_late)
    slept = list[float]()
    wait = partial(wait_for_room, now_s=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(device_memory, "wait_for_room", wait)
    memory.take_back()
    assert len(slept) == 2
    assert memory.num_bytes == 8 * 4 == sum(len(part) for run in memory.chunks() for _, part in run)


def test_a_lost_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory([torch.zeros(8)], CPU)
    memory.give_back()
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.UntypedStorage, "resize_", failing(lost))
    wait = partial(wait_for_room, now_s=lambda: 0, sleep=failing(AssertionError("it waits")))
    monkeypatch.setattr(device_memory, "wait_for_room", wait)
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        memory.take_back()


def test_a_chunk_is_never_larger_than_a_block_and_all_bytes_are_there(small_chunks: None) -> None:
    memory = DeviceMemory([*Tied().parameters(), torch.zeros(100, dtype=torch.uint8)], CPU)
    runs = [*memory.chunks()]
    ends = [place + len(part) for run in runs for place, part in run[-1:]]
    assert ends == [100] * (len(runs) - 1) + [memory.num_bytes - 100 * (len(runs) - 1)]
    for run in runs:
        at = 0
        for place, part in run:
            assert place == at
            at += len(part)


def test_a_block_for_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def empty(size: int, **options: Any) -> torch.Tensor:
        asked.append({"size": size, **options})
        return torch.zeros(0)

    monkeypatch.setattr(torch, "empty", empty)
    pinned_block(torch.device("cuda", 0))
    assert asked == [{"size": CHUNK_BYTES, "dtype": torch.uint8, "pin_memory": True}]


def test_a_block_wastes_no_memory_of_torchs_pinned_allocator() -> None:
    assert CHUNK_BYTES.bit_count() == 1


def test_all_copies_go_through_such_blocks(
    small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []

    def block(device: torch.device) -> torch.Tensor:
        made.append(pinned_block(device))
        return made[-1]

    monkeypatch.setattr(device_memory, "pinned_block", block)
    copy = PinnedCopy(DeviceMemory(Tied().parameters(), CPU))
    assert [id(each) for each in copy._blocks] == [id(each) for each in made]
    assert len(made) == 4  # of 374 bytes


def test_weights_that_can_not_be_pinned_go_to_a_file(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_memory, "CHUNK_BYTES", 200)
    released: list[torch.device] = []
    monkeypatch.setattr(device_memory, "_unpin_free_blocks", released.append)
    model = Tied()
    before, blocks = model.contents(), iter(range(1))

    def second_fails(device: torch.device) -> torch.Tensor:
        if released or next(blocks, None) is not None:
            return pinned_block(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device_memory, "pinned_block", second_fails)
    weights = DeviceWeights(model, CPU)
    weights.give_back()
    assert released == [CPU]
    assert weights.level == 2
    assert "weights go to a file, not to pinned memory: CUDA error: out of memory" in caplog.text
    weights.fill()
    assert are_equal(model.contents(), before)


def test_blocks_are_given_back_once_the_device_copies_to_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = list[str]()
    monkeypatch.setattr(device_memory, "wait_for", lambda device: done.append(f"wait for {device}"))
    empty = partial(done.append, "empty")
    monkeypatch.setattr(torch._C, "_host_emptyCache", empty, raising=False)
    device_memory._unpin_free_blocks(torch.device("cuda", 1))
    device_memory._unpin_free_blocks(CPU)
    assert done == ["wait for cuda:1", "empty"]


def test_a_lost_device_is_not_taken_for_missing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "is_fatal", lambda error: True)
    monkeypatch.setattr(device_memory, "pinned_block", failing(RuntimeError("lost")))
    with pytest.raises(RuntimeError, match="lost"):
        store(DeviceMemory(Tied().parameters(), CPU))


def test_weights_without_room_anywhere_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", failing(full))
    model = Tied()
    before, weights = model.contents(), DeviceWeights(model, CPU)
    with pytest.raises(OSError, match="No space left"):
        weights.give_back()
    assert not weights.is_given_back
    assert weights.level is None
    assert are_equal(model.contents(), before)
    monkeypatch.undo()
    weights.give_back()
    assert weights.is_given_back


def test_a_file_that_has_ended_fills_nothing_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 0)
    weights = DeviceWeights(Tied(), CPU)
    weights.give_back()
    copy = weights._copy
    assert isinstance(copy, device_memory.FileCopy)
    os.ftruncate(copy._file.fileno(), 100)
    with pytest.raises(OSError, match="ended too early"):
        weights.fill()
    assert weights.is_given_back


@pytest.fixture
def card() -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    yield device
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("level", [1, 2])
def test_a_cards_memory_is_free_while_its_weights_are_elsewhere(
    level: int, card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(8192, 8192, device=card, dtype=torch.bfloat16).requires_grad_(
        requires_grad=False
    )
    room = 2**40 if level == 1 else 0
    monkeypatch.setattr(cgroup, "available_bytes", lambda: room)
    rows = torch.randn(5, 8192, device=card, dtype=torch.bfloat16)
    expected = model(rows)
    weights = DeviceWeights(model, card)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(card)[0]
    weights.give_back()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(card)[0] - free >= 8192 * 8192 * 2 - 2**22
    assert weights.level == level
    if level == 1:
        assert isinstance(weights._copy, PinnedCopy)
        assert all(each.is_pinned() for each in weights._copy._blocks)
    weights.fill()
    assert torch.equal(model(rows), expected)
