from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from weakref import ref

import pytest
import torch

from deployments.engine.cpu.shared_input import SharedInput, SharedInputPart
from tests.engine.cpu.linears import assert_near, linear, rows_of

SIZES = (40, 8, 16)


def linears(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.nn.Linear]:
    return [linear(24, size, bias=bias, dtype=dtype) for size in SIZES]


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_in_any_order_are_what_the_layers_give(
    dtype: torch.dtype, bias: bool, order: tuple[int, ...]
) -> None:
    layers = linears(bias=bias, dtype=dtype)
    shared = SharedInput(layers)
    parts = [SharedInputPart(shared, part) for part in range(3)]
    for shape in [(24,), (5, 24), (1, 5, 24)]:
        rows = rows_of(*shape, dtype=dtype)
        for part in order:
            assert_near(parts[part](rows), layers[part](rows))


def test_all_parts_cost_one_product() -> None:
    shared, rows, inputs = SharedInput(linears()), rows_of(5, 24), list[torch.Tensor]()
    shared._joined.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    for part in range(3):
        shared.take(part, rows)
    assert len(inputs) == 1


def test_a_part_that_is_asked_for_twice_is_given_twice() -> None:
    layers, rows = linears(), rows_of(5, 24)
    shared = SharedInput(layers)
    for part in (1, 1, 0, 1, 2, 0):
        assert_near(shared.take(part, rows), layers[part](rows))


def test_another_input_is_not_given_what_is_left_of_the_last() -> None:
    layers = linears()
    shared = SharedInput(layers)
    first, second = rows_of(5, 24), rows_of(2, 24) * 3
    for rows, part in ((first, 0), (second, 1), (first, 2), (first.clone(), 1), (second, 0)):
        assert_near(shared.take(part, rows), layers[part](rows))


def test_the_input_and_the_outputs_are_not_kept_when_all_are_taken() -> None:
    shared, rows = SharedInput(linears()), rows_of(5, 24)
    outputs = [ref(shared.take(part, rows)) for part in range(3)]
    seen = ref(rows)
    del rows
    assert seen() is None
    assert [output() for output in outputs] == [None] * 3


def test_an_input_of_which_parts_are_left_is_kept_so_that_no_other_is_taken_for_it() -> None:
    shared, rows = SharedInput(linears()), rows_of(5, 24)
    shared.take(0, rows)
    seen = ref(rows)
    del rows
    assert seen() is not None
    for part in range(3):
        shared.take(part, rows_of(1, 24))


def test_threads_that_share_layers_take_each_their_own_outputs() -> None:
    layers = linears()
    shared, rows, others = SharedInput(layers), rows_of(5, 24), rows_of(3, 24)
    assert_near(shared.take(0, rows), layers[0](rows))
    with ThreadPoolExecutor(max_workers=1) as lane:
        found = [lane.submit(shared.take, part, others).result() for part in range(3)]
    for part in range(3):
        assert_near(found[part], layers[part](others))
    for part in (1, 2):
        assert_near(shared.take(part, rows), layers[part](rows))
