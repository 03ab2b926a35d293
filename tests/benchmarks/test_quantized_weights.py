from collections.abc import Callable, Iterable

import pytest
import torch

from benchmarks.cpu_shapes import chosen_dtype
from benchmarks.quantized_weights import WEIGHTS, add_row, layers_of, new_table
from deployments.compute.cpu.linear.quantized_linear import quantization_obstacle


def replay(seconds: Iterable[float]) -> Callable[[], float]:
    return iter(seconds).__next__


def test_a_ratio_is_the_median_of_the_rounds_and_not_that_of_the_medians() -> None:
    table = new_table("products", "rows")
    runs = {
        "plain": replay([0.001, 0.004, 0.002]),
        "int8": replay([0.001, 0.002, 0.004]),
        "int4": replay([0.0005, 0.001, 0.001]),
    }
    add_row(table, "8", runs, 3)
    assert [list(column.cells) for column in table.columns] == [
        ["8"],
        ["2.00"],
        *(["2.00"], ["1.00"]),
        *(["1.00"], ["2.00"]),
    ]


@pytest.mark.skipif(quantization_obstacle() is not None, reason=str(quantization_obstacle()))
def test_all_weights_are_those_of_the_same_layer() -> None:
    layers = layers_of(64, 512)
    assert tuple(layers) == WEIGHTS
    rows = torch.randn(9, 512).to(chosen_dtype())
    plain, *quantized = (layer(rows).float() for layer in layers.values())
    for each, error in zip(quantized, (0.02, 0.2), strict=True):
        assert float((each - plain).norm() / plain.norm()) < error
