from collections.abc import Iterator

import pytest
import torch

from deployments.device.device import CpuDevice, num_compute_threads, num_cores
from deployments.device_share import claim_share, set_compute_threads
from tests.deployments.tiny_folder import spec

LARGE_BYTES = 1000


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Restore the number of threads that torch computes with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_gpus", "share"), [(0.25, 0.25), (1.0, 1.0), (0.0, 1.0)])
def test_the_process_is_capped_at_its_share_and_loads_on_every_core(
    monkeypatch: pytest.MonkeyPatch, num_gpus: float, share: float
) -> None:
    enforced: list[float] = []
    monkeypatch.setattr(CpuDevice, "enforce_share", lambda _, share: enforced.append(share))
    claim_share(spec("m", num_gpus=num_gpus), CpuDevice())
    assert enforced == [share]
    assert torch.get_num_threads() == num_cores()


def test_the_number_of_threads_is_the_spec_s() -> None:
    assert set_compute_threads(spec("m", num_threads=3), LARGE_BYTES, LARGE_BYTES) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("weight_bytes", [LARGE_BYTES - 1, LARGE_BYTES])
def test_without_a_number_in_the_spec_the_weights_decide(weight_bytes: int) -> None:
    chosen = set_compute_threads(spec("m"), weight_bytes, LARGE_BYTES)
    assert chosen == num_compute_threads(weight_bytes, LARGE_BYTES) == torch.get_num_threads()
