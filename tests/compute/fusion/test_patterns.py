import pytest
import torch

from deployments.compute.fusion.patterns import Operator

aten = torch.ops.aten


def nodes() -> tuple[torch.fx.Graph, torch.fx.Node, torch.fx.Node]:
    graph = torch.fx.Graph()
    return graph, graph.placeholder("x"), graph.placeholder("y")


def test_names_match_any_argument() -> None:
    graph, x, y = nodes()
    total = graph.call_function(aten.add.Tensor, (x, 0.5))
    product = graph.call_function(aten.mul.Tensor, (total, y))
    pattern = Operator(aten.mul.Tensor, (Operator(aten.add.Tensor, ("x", "shift")), "y"))
    assert pattern.match(product) == {"x": x, "shift": 0.5, "y": y}
    assert pattern.match(total) is None


def test_a_sum_and_a_product_match_in_either_order() -> None:
    graph, x, y = nodes()
    negative = Operator(aten.neg.default, ("x",))
    pattern = Operator(aten.mul.Tensor, ("y", negative))
    negated = graph.call_function(aten.neg.default, (x,))
    for arguments in ((y, negated), (negated, y)):
        node = graph.call_function(aten.mul.Tensor, arguments)
        assert pattern.match(node) == {"x": x, "y": y}
    ordered = Operator(aten.sub.Tensor, ("y", negative))
    assert ordered.match(graph.call_function(aten.sub.Tensor, (negated, y))) is None


def test_a_repeated_name_matches_one_thing() -> None:
    graph, x, y = nodes()
    square = Operator(aten.mul.Tensor, ("x", "x"))
    assert square.match(graph.call_function(aten.mul.Tensor, (x, x))) == {"x": x}
    assert square.match(graph.call_function(aten.mul.Tensor, (x, y))) is None
    halves = Operator(aten.split_with_sizes.default, ("x", ["n", "n"], -1))
    for sizes, is_match in (([8, 8], True), ([8, 4], False), ([8, 8, 8], False)):
        split = graph.call_function(aten.split_with_sizes.default, (x, sizes, -1))
        assert (halves.match(split) is not None) is is_match


@pytest.mark.parametrize("literal", [1, True, 2.0, None])
def test_a_literal_matches_only_itself(literal: object) -> None:
    graph, x, _ = nodes()
    shifted = graph.call_function(aten.add.Tensor, (x, 1.0))
    assert Operator(aten.add.Tensor, ("x", 1.0)).match(shifted)
    assert Operator(aten.add.Tensor, ("x", literal)).match(shifted) is None


def test_options_count_except_the_device() -> None:
    graph, x, y = nodes()
    scaled = graph.call_function(aten.add.Tensor, (x, y), {"alpha": 2})
    assert Operator(aten.add.Tensor, ("x", "y")).match(scaled) is None
    options: dict[str, torch.fx.node.Argument] = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    cast = graph.call_function(aten._to_copy.default, (x,), options)
    for dtype, is_match in ((torch.float32, True), (torch.float64, False)):
        pattern = Operator(aten._to_copy.default, ("x",), {"dtype": dtype})
        assert (pattern.match(cast) is not None) is is_match
