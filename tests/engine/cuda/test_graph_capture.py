import pytest
import torch

from deployments.engine.cuda.graph_capture import open_capturer


def test_a_cpu_captures_nothing() -> None:
    assert open_capturer(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_can_not_use_captures_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert open_capturer(torch.device("cuda", 0)) is None
    assert "no CUDA graphs" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_captured_run_follows_its_inputs() -> None:
    capturer = open_capturer(torch.device("cuda", 0))
    assert capturer is not None
    inputs, outputs = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    weights = torch.randn(4, 4, device="cuda")
    capturer.warm_up(lambda: weights @ inputs)
    graph = capturer.capture(lambda: outputs.copy_(weights @ inputs))
    inputs.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(outputs, weights @ inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_capture_that_fails_leaves_its_stream() -> None:
    capturer = open_capturer(torch.device("cuda", 0))
    assert capturer is not None
    inputs = torch.ones(4, device="cuda")
    before = torch.cuda.current_stream()

    def wait() -> torch.Tensor:
        return inputs * inputs.sum().item()

    capturer.warm_up(wait)
    with pytest.raises(RuntimeError):
        capturer.capture(wait)
    assert torch.cuda.current_stream() == before
    assert (inputs + 1).tolist() == [2.0] * 4
