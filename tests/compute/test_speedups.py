import logging

import pytest
import torch

from deployments.compute.speedups import fuse_on_gpu, unless_triton_fails
from tests.failing import failing


def test_a_type_without_fused_operators_on_a_gpu_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    with caplog.at_level(logging.INFO):
        assert fuse_on_gpu(graph, torch.float16, torch.device("cuda", 0)) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "torch.float16 has no fused ones" in record.message


@pytest.mark.parametrize(
    "error", [ImportError("no triton"), RuntimeError("Failed to find C compiler")]
)
def test_without_triton_the_reason_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert unless_triton_fails(failing(error), "nothing is fused") is None
    assert f"nothing is fused: {type(error).__name__}: {error}" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ],
)
def test_an_error_of_the_device_is_no_reason_to_do_without_triton(error: Exception) -> None:
    with pytest.raises(type(error)):
        unless_triton_fails(failing(error), "nothing is fused")
