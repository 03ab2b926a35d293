from dataclasses import replace
from typing import Any

import pytest

from serve_app.config import AppConfig
from serve_app.placement import Demand, Node, choose_num_cpus, demands_of, fits

TWO_CORES = [Node(2)]
INGRESS = Demand("Ingress", 2, 0.2)


def models(*num_cpus: float | None, num_gpus: float = 0.0) -> list[Demand]:
    return [Demand(f"m{i}", 1, cpus, num_gpus) for i, cpus in enumerate(num_cpus)]


@pytest.mark.parametrize(
    ("number", "expected"), [(1, 1.0), (2, 0.5), (3, 0.5), (4, 0.25), (9, 0.1)]
)
def test_auto_is_a_core_or_what_fits_beside_the_others(number: int, expected: float) -> None:
    chosen = choose_num_cpus([INGRESS, *models(*[None] * number)], TWO_CORES, {})
    assert set(chosen.values()) == {expected}
    assert len(chosen) == number


def test_auto_takes_what_given_numbers_leave() -> None:
    assert choose_num_cpus([INGRESS, *models(1.0, None)], TWO_CORES, {}) == {"m1": 0.5}
    assert choose_num_cpus([INGRESS, *models(1.5, None)], TWO_CORES, {}) == {"m1": 0.1}


def test_a_replica_fits_on_one_node_not_on_two_together() -> None:
    nodes = [Node(1), Node(1)]
    assert fits(models(0.6, 0.6, 0.4, 0.4), nodes)
    assert not fits(models(0.6, 0.6, 0.6), nodes)
    assert not fits(models(1.5), nodes)


def test_on_a_cluster_without_cores_yet_auto_is_a_whole_one() -> None:
    assert choose_num_cpus(models(None), [Node(0)], {}) == {"m0": 1.0}
    assert choose_num_cpus(models(None), [], {}) == {"m0": 1.0}


def test_what_runs_keeps_its_number_if_the_others_fit_beside_it() -> None:
    demands = [INGRESS, *models(None, None)]
    assert choose_num_cpus(demands, TWO_CORES, {"m0": 1.0}) == {"m0": 1.0, "m1": 0.5}
    four = [INGRESS, *models(None, None, None, None)]
    assert set(choose_num_cpus(four, TWO_CORES, {"m0": 1.6}).values()) == {0.25}


def test_a_model_on_a_gpu_gets_cores_where_the_gpus_are() -> None:
    nodes = [Node(64), Node(4, num_gpus=8)]
    on_gpus = [Demand("chat", 8, None, 1.0)]
    assert choose_num_cpus([INGRESS, *on_gpus], nodes, {}) == {"chat": 0.5}


@pytest.mark.parametrize(
    ("shares", "num_gpus", "expected"),
    [
        ([0.6, 0.6], 1, False),
        ([0.6, 0.4], 1, True),
        ([0.6, 0.6, 0.6], 2, False),  # 1.8 of 2, but no GPU has 0.6 left
        ([0.6, 0.6, 0.4, 0.4], 2, True),
        ([2.0], 2, True),
        ([2.0, 0.1], 2, False),
    ],
)
def test_shares_must_fit_on_single_gpus(shares: list[float], num_gpus: int, expected: bool) -> None:
    demands = [Demand(str(i), 1, 0.0, share) for i, share in enumerate(shares)]
    assert fits(demands, [Node(1, num_gpus)]) is expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([Node(1, 2), Node(1, 2)], True),
        ([Node(1, 4)], True),
        ([Node(1, 2), Node(1, 1)], False),
        ([Node(0.1, 2), Node(0.1, 2)], False),  # no node has the replica's cores beside a GPU
        ([Node(8), Node(0, 4)], False),
    ],
)
def test_gpus_of_a_replica_that_is_spread_may_be_on_several_nodes(
    nodes: list[Node], expected: bool
) -> None:
    assert fits([Demand("m", 1, 0.5, 4.0, is_spread=True)], nodes) is expected
    assert fits([Demand("m", 1, 0.5, 4.0)], [Node(1, 2), Node(1, 2)]) is False


def test_a_model_whose_workers_ray_starts_is_spread_whatever_its_section_says() -> None:
    args = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    entry = {"id": "m", "source": "x", "engine": "vllm", "engine_args": args, "num_cpus": 0.3}
    config = AppConfig.model_validate({"models": [entry]})
    sections = [{"name": "m", "ray_actor_options": {"num_cpus": 2}}]
    for given, num_cpus in (((), 0.3), (sections, 2)):
        found = demands_of(config, given, {"m": 2.0}, has_ledger=False)
        assert found[1] == Demand("m", 1, num_cpus, 2.0, is_spread=True)


ARGS = AppConfig.model_validate({"models": [{"id": "a/b", "source": "x", "num_cpus": 0.3}]})


@pytest.mark.parametrize(
    ("section", "first", "most"),
    [
        ({}, 1, 1),
        ({"num_replicas": 3}, 3, 3),
        ({"num_replicas": "auto"}, 1, 8),
        ({"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}, 0, 4),
        ({"autoscaling_config": {"min_replicas": 2}}, 2, 2),
        ({"autoscaling_config": {"initial_replicas": 5, "max_replicas": 50}}, 5, 8),
    ],
)
def test_replicas_are_those_of_the_start_or_as_many_as_may_come(
    section: dict[str, Any], first: int, most: int
) -> None:
    for expected, limit in ((first, None), (most, 8)):
        found = demands_of(
            ARGS, [{"name": "a--b", **section}], {"a/b": 0.5}, has_ledger=False, most=limit
        )
        assert found == [Demand("Ingress", 1, 0.2), Demand("a--b", expected, 0.3, 0.5)]


def test_models_that_take_turns_divide_what_one_of_them_would_reserve() -> None:
    three = [replace(each, num_turns=3) for each in models(None, None, None)]
    third = pytest.approx(0.3333)
    assert choose_num_cpus([INGRESS, *three], TWO_CORES, {}) == {
        "m0": third, "m1": third, "m2": third
    }  # fmt: skip
    beside = choose_num_cpus([INGRESS, *models(1.5), *three[1:]], TWO_CORES, {})
    assert beside == {"m1": pytest.approx(0.0333), "m2": pytest.approx(0.0333)}
    assert choose_num_cpus(three, [], {}) == {"m0": third, "m1": third, "m2": third}
    kept = choose_num_cpus([INGRESS, *three], TWO_CORES, {"m0": 0.1})
    assert kept == {"m0": 0.1, "m1": third, "m2": third}


def test_models_of_a_light_group_are_counted_beside_each_other_from_the_start() -> None:
    both = AppConfig.model_validate(
        {"models": [{"id": "a/b", "source": "x", "num_cpus": 0.3}, {"id": "c", "source": "x"}]}
    )
    sections = [{"name": name, "autoscaling_config": {"min_replicas": 0}} for name in ("a--b", "c")]
    groups = [("a/b", "c")]
    found = demands_of(both, sections, {}, has_ledger=False, light_groups=groups)
    assert found[1:] == [
        Demand("a--b", 1, 0.3, num_turns=2),
        Demand("c", 1, None, num_turns=2),
    ]
    assert [each.number for each in demands_of(both, sections, {}, has_ledger=False)] == [1, 0, 0]


def test_models_of_a_light_group_divide_the_card_that_each_of_them_plans_with() -> None:
    ids = ("a", "b", "c")
    group = AppConfig.model_validate({"models": [{"id": id_, "source": "x"} for id_ in ids]})
    shares = dict.fromkeys(ids, 1.0)
    found = demands_of(group, [], shares, has_ledger=False, light_groups=[ids])
    assert [each.num_gpus for each in found[1:]] == [0.3333] * 3
    card = [Node(4.0, num_gpus=1)]
    assert fits(found, card)
    assert not fits(demands_of(group, [], shares, has_ledger=False), card)


def test_actor_options_stand_in_for_both_numbers_as_in_ray() -> None:
    sections = [{"name": "a--b", "ray_actor_options": {"num_cpus": 2}}]
    found = demands_of(ARGS, sections, {"a/b": 0.5}, has_ledger=True)
    assert found[1:] == [Demand("KeyLedger", 1, 0.01), Demand("a--b", 1, 2, 0.0)]
