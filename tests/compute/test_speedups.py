import logging

import pytest
import torch

from deployments.compute.speedups import fuse_on_gpu


def test_a_type_without_fused_operators_on_a_gpu_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    with caplog.at_level(logging.INFO):
        assert fuse_on_gpu(graph, torch.float16, torch.device("cuda", 0)) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "torch.float16 has no fused ones" in record.message
