"""A GPU's memory, with the CPU's in its place: strict about what is done with it, and when.

Memory that was given back is lost, and what comes in its place holds NaN. Nothing may be given back
while the device may still work, and no captured graph may be replayed that has used it.
"""

from typing import Any

import pytest
import torch

from deployments.compute.gpu import device_memory
from deployments.compute.gpu.device_memory import DeviceWeights
from deployments.compute.merged_linear import merge_plainly
from deployments.engine import engine as engine_module
from deployments.engine.attention import kv_cache
from deployments.engine.engine import Engine
from deployments.engine.model import loader
from deployments.engine.model.runner import ModelRunner
from tests.engine.fake_graphs import FakeCapturer, releases
from tests.engine.fake_varlen import FakeVarlen

RESIZE = torch.UntypedStorage.resize_


class FakeCard:
    """Lets engines run as on a GPU: with graphs, reads by length, and memory of the device's own.

    Attributes:
        capturer: Captures their steps.
        is_idle: Whether the device has been waited for since the last step.
        is_cache_empty: Whether torch's allocator has returned what was given back to it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturer = FakeCapturer()
        self.is_idle = True
        self.is_cache_empty = True
        monkeypatch.setattr(engine_module, "has_kernels", lambda device: False)
        monkeypatch.setattr(engine_module, "open_capturer", lambda device: self.capturer)
        monkeypatch.setattr(engine_module, "find_obstacle", lambda *_: None)
        monkeypatch.setattr(engine_module, "open_weights", DeviceWeights)
        monkeypatch.setattr(engine_module, "release_cache", self._release_cache)
        monkeypatch.setattr(kv_cache, "comes_with_writes", lambda device: False)
        monkeypatch.setattr(
            loader, "pack_weights", lambda model, quantization: merge_plainly(model)
        )
        monkeypatch.setattr(device_memory, "wait_for", self._wait_for)
        FakeVarlen(monkeypatch, torch.float32)
        run = ModelRunner.run

        def run_and_work_on(runner: ModelRunner, *arguments: Any) -> Any:
            self.is_idle = False
            return run(runner, *arguments)

        monkeypatch.setattr(ModelRunner, "run", run_and_work_on)

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            if num_bytes == 0:
                assert self.is_idle, "the device may still read this"
                assert storage.nbytes() > 0, "this was given back already"
                self.is_cache_empty = False
                releases[storage._cdata] += 1
            RESIZE(storage, num_bytes)
            if num_bytes:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in any float type
            return storage

        monkeypatch.setattr(torch.UntypedStorage, "resize_", resize, raising=False)

    def _wait_for(self, device: torch.device) -> None:
        self.is_idle = True

    def _release_cache(self, device: torch.device) -> None:
        self.is_cache_empty = True


def storages(engine: Engine) -> list[torch.UntypedStorage]:
    """Return what holds the weights, keys and values of an engine."""
    weights = [*engine._model.parameters(), *engine._model.buffers()]
    return [each.untyped_storage() for each in (*weights, *kv_tensors(engine))]


def kv_tensors(engine: Engine) -> tuple[torch.Tensor, ...]:
    """Return all keys and values, and the memory through which they are moved; tokens first."""
    return (*engine._kv.keys, *engine._kv.values, engine._kv._held)
