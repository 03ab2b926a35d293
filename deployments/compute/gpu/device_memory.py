"""A GPU's memory that goes back while a model sleeps lightly: its weights, its keys and values.

Modules, traced graphs and views hold storages. A storage without memory keeps them, and with new
memory all of them are valid again. The new memory lies elsewhere, so what holds addresses (CUDA
graphs) must be dropped and captured again.

Weights are copied before they go, once: they never change, so the copy stays. It lies in pinned
host memory (level 1), from which a copy reaches the device as fast as the bus allows. Where the
host has no room for that, it lies in a file without a name on a disk (level 2).
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, Protocol

import torch

from deployments.compute.card_room import wait_for_room
from deployments.compute.device_errors import is_fatal, is_out_of_memory
from deployments.compute.host_to_device import wait_for
from deployments.plan.cache_folder import UnnamedFile

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 2**26
"""What is copied from or to one block of pinned memory. torch rounds such blocks up to a power of
two, so another size would waste up to half of the host's memory."""

SPARE_BYTES: Final = 2**30
"""Host memory that pinned weights leave free: pinned pages can't be reclaimed or swapped."""

Run = list[tuple[int, torch.Tensor]]
"""Parts of a chunk, each with its place in it: [n], uint8, on the device."""


class DeviceMemory:
    """The memory of tensors on a device, each storage once."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Leave the memory as it is.

        Args:
            tensors: Those elsewhere, and those whose memory torch did not allocate, stay.
            device: The device.
        """
        self.device = device
        held = (each.untyped_storage() for each in tensors if each.device.type == device.type)
        found = {each._cdata: each for each in held if each.resizable()}
        self._storages = tuple((each, each.nbytes()) for each in found.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages, whether they have their memory now or not."""
        return sum(num_bytes for _, num_bytes in self._storages)

    def give_back(self) -> None:
        """Give the memory to torch's allocator, once the device has done all work."""
        wait_for(self.device)
        for storage, _ in self._storages:
            storage.resize_(0)

    def take_back(self) -> None:
        """Get memory again, elsewhere, with whatever another program has left there.

        Raises:
            RuntimeError: The device has had no room for some seconds (`is_out_of_memory`; see
                `card_room`), or is lost (`is_fatal`).
        """
        left = deque(self._storages)
        if not wait_for_room(partial(_has_taken, left)):
            _take(left)

    def chunks(self) -> Iterator[Run]:
        """Yield all bytes, in the same order each time, in runs of `CHUNK_BYTES` at most."""
        run, filled = Run(), 0
        for storage, num_bytes in self._storages:
            content = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            start = 0
            while start < num_bytes:
                part = content[start : start + CHUNK_BYTES - filled]
                run.append((filled, part))
                filled, start = filled + len(part), start + len(part)
                if filled == CHUNK_BYTES:
                    yield run
                    run, filled = Run(), 0
        if run:
            yield run


class HostCopy(Protocol):
    """What a device's memory held, kept elsewhere.

    Attributes:
        level: 1 in host memory, 2 in a file.
    """

    level: int

    def load(self, memory: DeviceMemory) -> None:
        """Copy all of it to the memory that it came from, and wait until it is there.

        Raises:
            OSError: It can't be read.
        """
        ...


class PinnedCopy:
    """A copy in pinned host memory; see `HostCopy`."""

    level = 1

    def __init__(self, memory: DeviceMemory) -> None:
        """Copy.

        Raises:
            RuntimeError: The system pins no memory, or not as much.
        """
        self._blocks: list[torch.Tensor] = []
        for run in memory.chunks():
            block = pinned_block(memory.device)
            _fetch(run, block)
            self._blocks.append(block)
        wait_for(memory.device)

    def load(self, memory: DeviceMemory) -> None:
        """See `HostCopy`."""
        for block, run in zip(self._blocks, memory.chunks(), strict=True):
            _send(run, block)
        wait_for(memory.device)


class FileCopy:
    """A copy in a file without a name; see `HostCopy`."""

    level = 2

    def __init__(self, memory: DeviceMemory) -> None:
        """Copy.

        Raises:
            OSError: It can't be written.
            RuntimeError: The user has no home to write to, or the system pins no memory.
        """
        file = UnnamedFile(memory.num_bytes)
        file.write(self._fetched(memory))
        self._file = file

    def load(self, memory: DeviceMemory) -> None:
        """See `HostCopy`."""
        self._file.read(self._sent(memory))

    @staticmethod
    def _fetched(memory: DeviceMemory) -> Iterator[memoryview]:
        """Yield all bytes; each part is overwritten by the next one."""
        block = pinned_block(memory.device)
        for run in memory.chunks():
            _fetch(run, block)
            wait_for(memory.device)
            yield _content(block, run)

    @staticmethod
    def _sent(memory: DeviceMemory) -> Iterator[memoryview]:
        """Yield memory to fill with all bytes, and send each part before the next one."""
        block = pinned_block(memory.device)
        for run in memory.chunks():
            yield _content(block, run)
            _send(run, block)
            wait_for(memory.device)


class DeviceWeights:
    """The weights of a model on a GPU, which are there, or in host memory or a file.

    Attributes:
        is_given_back: Whether they are not on the GPU.
    """

    keeps_addresses = False

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave the weights where they are.

        Args:
            model: On the device, as it will stay: nothing replaces a weight any more.
            device: The device.
        """
        self._model = model
        self._device = device
        self._memory: DeviceMemory | None = None
        self._copy: HostCopy | None = None
        self.is_given_back = False

    @property
    def level(self) -> int | None:
        """Where they are while the model sleeps; see `HostCopy`. None before the first time."""
        return None if self._copy is None else self._copy.level

    def give_back(self) -> None:
        """Give the weights' memory to torch's allocator.

        Raises:
            OSError: They find room neither in host memory nor on the disk; all are still there.
            RuntimeError: The same, or the device is lost (`is_fatal`).
        """
        if self._memory is None or self._copy is None:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            memory = DeviceMemory(tensors, self._device)
            self._copy, self._memory = store(memory), memory
        self._memory.give_back()
        self.is_given_back = True

    def fill(self) -> None:
        """Take memory again and copy the weights there; do nothing if they are there.

        Raises:
            OSError: They can't be read; the model must not be used any more.
            RuntimeError: The device has no room, or is lost; the same.
        """
        if self.is_given_back:
            assert self._memory is not None, "what was given back was copied before"
            assert self._copy is not None, "as above"
            self._memory.take_back()
            self._copy.load(self._memory)
            self.is_given_back = False


def store(memory: DeviceMemory) -> HostCopy:
    """Copy a device's memory to the host's, or to a file where that has no room.

    Raises:
        OSError: It can't be written, either.
        RuntimeError: The same, or the device is lost (`is_fatal`).
    """
    # Imported here: it needs psutil, which a machine that only measures the engine may lack.
    from deployments.plan import cgroup

    available = cgroup.available_bytes()
    if memory.num_bytes + SPARE_BYTES > available:
        why = f"{available / 2**30:.1f} GiB of host memory are free"
    else:
        try:
            return PinnedCopy(memory)
        except (MemoryError, RuntimeError) as error:
            if is_fatal(error):
                raise
            why = str(error)
        # Outside the except block, since the traceback held the blocks.
        _unpin_free_blocks(memory.device)
    size = memory.num_bytes / 2**30
    logger.warning("%.1f GiB of weights go to a file, not to pinned memory: %s", size, why)
    return FileCopy(memory)


def _has_taken(left: deque[tuple[torch.UntypedStorage, int]]) -> bool:
    """Give storages memory while there is room; return whether all have it."""
    try:
        _take(left)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def _take(left: deque[tuple[torch.UntypedStorage, int]]) -> None:
    """Give storages memory of these sizes, and remove each that has it.

    Raises:
        RuntimeError: The device has no room for the first one that is left, or is lost.
    """
    while left:
        storage, num_bytes = left[0]
        storage.resize_(num_bytes)
        left.popleft()


def pinned_block(device: torch.device) -> torch.Tensor:
    """Return a block of host memory, pinned for a GPU: [CHUNK_BYTES], uint8.

    Raises:
        RuntimeError: The system pins no more memory.
    """
    return torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _unpin_free_blocks(device: torch.device) -> None:
    """Give pinned blocks that no tensor holds back to the system; torch would keep them.

    It keeps those to which the device still copies, too, so the device is waited for.
    """
    if device.type == "cuda":
        wait_for(device)
        torch._C._host_emptyCache()


def _fetch(run: Run, block: torch.Tensor) -> None:
    for place, part in run:
        block[place : place + len(part)].copy_(part, non_blocking=True)


def _send(run: Run, block: torch.Tensor) -> None:
    for place, part in run:
        part.copy_(block[place : place + len(part)], non_blocking=True)


def _content(block: torch.Tensor, run: Run) -> memoryview:
    """Return the bytes of a block that a run takes, to read and to write."""
    place, part = run[-1]
    return block.numpy().data[: place + len(part)]
