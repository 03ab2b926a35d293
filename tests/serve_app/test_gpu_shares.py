from pathlib import Path
from typing import Any

import pytest

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.plan.model_shape import ModelShape
from serve_app.gpu_shares import resolve_models, share_gpus, to_spec
from serve_app.shipped_files import SHIPPED
from tests.hub_configs import shape_of


def no_shape(model: ModelConfig) -> ModelShape:
    raise AssertionError(f"nothing depends on the size of {model.id}")


def entry(id_: str, **settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": id_, "source": "x", **settings})


def size_of(model: ModelConfig) -> ModelShape:
    names = {"chat": "qwen2.5-7b-instruct", "large": "gemma-3-12b-it"}
    return shape_of(names.get(model.id, "radar-vicuna-7b"))


def test_a_model_by_itself_gets_a_whole_gpu() -> None:
    assert share_gpus([entry("chat")], 1, no_shape) == {"chat": 1.0}


def test_models_get_a_gpu_each_if_there_are_as_many() -> None:
    assert share_gpus([entry("chat"), entry("other")], 2, no_shape) == {"chat": 1.0, "other": 1.0}


def test_models_side_by_side_get_what_they_need_of_one_gpu() -> None:
    models = [entry("chat"), entry("large"), entry("detector", task="classify")]
    shares = share_gpus(models, 1, size_of)
    assert 0.95 < sum(shares.values()) <= 1
    assert shares["large"] > shares["chat"] > shares["detector"] >= 0.05


def test_a_given_share_leaves_the_rest() -> None:
    models = [entry("given", gpu_share=0.7), entry("chat")]
    assert share_gpus(models, 1, size_of) == {"given": 0.7, "chat": pytest.approx(0.3)}


def test_a_gpu_that_nobody_was_given_is_taken_whole() -> None:
    models = [entry("given", gpu_share=0.7), entry("chat")]
    assert share_gpus(models, 2, no_shape) == {"given": 0.7, "chat": 1.0}


def test_shares_that_leave_nothing_are_refused() -> None:
    for given in (1.0, 0.99):
        with pytest.raises(ValueError, match=r"nothing is left for .* lower the gpu_share"):
            share_gpus([entry("given", gpu_share=given), entry("chat")], 1, size_of)


def test_three_models_are_spread_over_two_gpus() -> None:
    models = [entry("chat"), entry("large"), entry("detector", task="classify")]
    shares = share_gpus(models, 2, size_of)
    assert shares["large"] == 1.0
    assert shares["chat"] + shares["detector"] == pytest.approx(1.0, abs=0.02)


def test_models_on_a_cpu_take_no_gpu() -> None:
    assert share_gpus([entry("chat", device="cpu"), entry("other", num_gpus=0)], 1, no_shape) == {}


@pytest.mark.parametrize(
    ("num_gpus", "device", "num_cluster_gpus", "expected"),
    [
        ("auto", "auto", 1, 0.25),
        ("auto", "auto", 0, 0.0),
        ("auto", "cpu", 1, 0.0),
        (0.5, "auto", 0, 0.5),
        (0.0, "auto", 1, 0.0),
    ],
)
def test_auto_asks_for_gpu_share_if_there_are_gpus_and_a_number_always_wins(
    num_gpus: float, device: str, num_cluster_gpus: int, expected: float
) -> None:
    model = ModelConfig.model_validate(
        {"id": "m", "source": "x", "num_gpus": num_gpus, "gpu_share": 0.25, "device": device}
    )
    assert resolve_models([model], num_cluster_gpus, no_shape)["m"].num_gpus == expected


def test_a_folder_is_found_from_the_project_wherever_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(id="m", source="models/pydoc-chat")
    assert to_spec(model, 0).source == str(SHIPPED / "models/pydoc-chat")


def test_an_adapter_s_folder_is_found_like_a_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    adapters = [{"id": "a", "source": "here"}, {"id": "b", "source": "org/b"}]
    entry = {"id": "m", "source": "org/m", "engine": "vllm", "adapters": adapters}
    found = to_spec(ModelConfig.model_validate(entry), 0).entry.adapters
    assert [each.source for each in found] == [str(tmp_path / "here"), "org/b"]


def test_a_source_that_is_not_a_folder_is_a_hub_id() -> None:
    model = ModelConfig(id="m", source="owner/name")
    assert to_spec(model, 0).source == "owner/name"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("~/my-model", "{home}/my-model"),
        ("~/nothing", "{home}/nothing"),
        ("my-model", "{home}/my-model"),
        ("./my-model", "{home}/my-model"),
        ("./nothing", "{home}/nothing"),
        ("nothing", "nothing"),
    ],
)
def test_what_can_only_be_a_path_is_one_and_a_folder_here_comes_before_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = to_spec(ModelConfig(id="m", source=source), 0).source
    assert found == expected.format(home=tmp_path)


def test_a_replica_is_told_its_whole_entry() -> None:
    model = ModelConfig(id="m", source="org/name", prefix_caching=False, max_queued_tokens=5000)
    assert to_spec(model, 0.5) == ModelSpec(model, "org/name", 0.5)


def test_a_model_of_vllm_gets_whole_gpus_unless_a_share_is_given() -> None:
    divided = entry("d", engine="vllm", engine_args={"tensor_parallel_size": 2})
    whole, half = entry("w", engine="vllm"), entry("h", engine="vllm", gpu_share=0.5)
    shares = share_gpus([divided, whole, half, entry("chat")], 5, no_shape)
    assert shares == {"d": 2.0, "w": 1.0, "h": 0.5, "chat": 1.0}
    assert share_gpus([divided, whole], 0, no_shape) == {}
    assert to_spec(divided, 2.0).device_share == 1.0


def test_workers_of_ray_s_have_whole_gpus_also_where_none_is_yet() -> None:
    args = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    divided = entry("d", engine="vllm", engine_args=args)
    assert share_gpus([divided], 0, no_shape) == {"d": 2.0}
    assert share_gpus([divided, entry("chat")], 3, no_shape) == {"d": 2.0, "chat": 1.0}
