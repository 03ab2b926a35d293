from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, product
from weakref import ref

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu.shapes import TINY
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear
from deployments.compute.merged_linear import MergedLinear, MergedLinearPart, merge_plainly
from tests.compute.cpu.linear.linears import DTYPES, assert_near, linear, rows_of

SIZES = (40, 8, 16)


def linears(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.nn.Linear]:
    return [linear(24, size, bias=bias, dtype=dtype) for size in SIZES]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_in_any_order_equal_the_layers_outputs(dtype: torch.dtype, bias: bool) -> None:
    layers = linears(bias=bias, dtype=dtype)
    merged = MergedLinear(layers, PrepackedLinear)
    parts = [MergedLinearPart(merged, part) for part in range(3)]
    for order, shape in product(permutations(range(3)), [(24,), (5, 24), (1, 5, 24)]):
        rows = rows_of(*shape, dtype=dtype)
        for part in order:
            assert_near(parts[part](rows), layers[part](rows))


def test_all_parts_cost_one_product() -> None:
    merged, rows, inputs = (
        MergedLinear(linears(), PrepackedLinear),
        rows_of(5, 24),
        list[torch.Tensor](),
    )
    merged._joined.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    for part in range(3):
        merged.take(part, rows)
    assert len(inputs) == 1


def test_a_part_can_be_taken_twice() -> None:
    layers, rows = linears(), rows_of(5, 24)
    merged = MergedLinear(layers, PrepackedLinear)
    for part in (1, 1, 0, 1, 2, 0):
        assert_near(merged.take(part, rows), layers[part](rows))


def test_another_input_does_not_get_pending_parts_of_the_last() -> None:
    layers = linears()
    merged = MergedLinear(layers, PrepackedLinear)
    first, second = rows_of(5, 24), rows_of(2, 24) * 3
    for rows, part in ((first, 0), (second, 1), (first, 2), (first.clone(), 1), (second, 0)):
        assert_near(merged.take(part, rows), layers[part](rows))


def test_the_input_and_the_outputs_are_released_when_all_parts_are_taken() -> None:
    merged, rows = MergedLinear(linears(), PrepackedLinear), rows_of(5, 24)
    outputs = [ref(merged.take(part, rows)) for part in range(3)]
    seen = ref(rows)
    del rows
    assert seen() is None
    assert [output() for output in outputs] == [None] * 3


def test_an_input_with_pending_parts_is_kept_so_that_no_other_gets_its_address() -> None:
    merged, rows = MergedLinear(linears(), PrepackedLinear), rows_of(5, 24)
    merged.take(0, rows)
    seen = ref(rows)
    del rows
    assert seen() is not None
    for part in range(3):
        merged.take(part, rows_of(1, 24))


def test_threads_that_run_the_same_layers_take_their_own_outputs() -> None:
    layers = linears()
    merged, rows, others = MergedLinear(layers, PrepackedLinear), rows_of(5, 24), rows_of(3, 24)
    assert_near(merged.take(0, rows), layers[0](rows))
    with ThreadPoolExecutor(max_workers=1) as lane:
        found = [lane.submit(merged.take, part, others).result() for part in range(3)]
    for part in range(3):
        assert_near(found[part], layers[part](others))
    for part in (1, 2):
        assert_near(merged.take(part, rows), layers[part](rows))


def test_a_models_layers_of_the_same_rows_become_one_of_torchs_with_the_same_result() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY.options)).train(mode=False)
    token_ids = torch.arange(7)[None]
    num_weights = sum(weight.numel() for weight in model.parameters())
    expected = model(token_ids).logits
    merge_plainly(model)
    torch.testing.assert_close(model(token_ids).logits, expected)
    assert sum(weight.numel() for weight in model.parameters()) == num_weights
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert len(linears) == 4 * model.config.num_hidden_layers + 1
