from collections.abc import Iterator

import pytest
import torch

from deployments.engine.cuda.attention_kernels import leave_out_cudnn


@pytest.fixture(autouse=True)
def choice() -> Iterator[None]:
    """Leave torch's choice as it was, which is the whole process's."""
    before = torch._C._get_cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_on_a_gpu_cudnn_is_left_out_and_the_others_stay() -> None:
    leave_out_cudnn(torch.device("cuda", 0))
    assert not torch._C._get_cudnn_sdp_enabled()
    assert torch._C._get_flash_sdp_enabled()
    assert torch._C._get_mem_efficient_sdp_enabled()
    assert torch._C._get_math_sdp_enabled()


def test_a_cpu_changes_nothing() -> None:
    leave_out_cudnn(torch.device("cpu"))
    assert torch._C._get_cudnn_sdp_enabled()
