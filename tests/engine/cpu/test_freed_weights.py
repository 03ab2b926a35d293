import weakref
from collections.abc import Iterator

import pytest
import torch

from deployments.engine.cpu.int8_linear import Int8Linear, int8_obstacle
from deployments.engine.cpu.prepack import prepack
from deployments.engine.cpu.prepacked_linear import PrepackedLinear
from deployments.engine.cpu.shared_input import Layer


class Watch(torch.nn.Module):
    """Notes, when its turn comes, whether a weight is still held."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weakref.ref(weight)
        self.is_held: list[bool] = []

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        self.is_held.append(self.weight() is not None)
        return super().named_children()


@pytest.mark.parametrize("layer", [PrepackedLinear, Int8Linear])
def test_weights_are_freed_one_layer_after_the_other(layer: Layer) -> None:
    if layer is Int8Linear and int8_obstacle():
        pytest.skip(str(int8_obstacle()))
    first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Identity())
    watch = Watch(first.get_parameter("0.weight"))
    prepack(torch.nn.Sequential(first, watch), layer)
    assert isinstance(first[0], layer)
    assert not watch.is_held[-1]
