import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.vllm_args import ENTRY_KEYS, VllmArgs


def entry(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": "m", "source": "x", **keys})


def refusal(**keys: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        entry(**keys)
    return "; ".join(str(each["msg"]) for each in caught.value.errors())


def test_what_is_given_keeps_vllms_names_and_the_rest_is_vllms_default() -> None:
    args = {"tensor_parallel_size": 2, "enforce_eager": False, "limit_mm_per_prompt": {"image": 0}}
    assert entry(engine="vllm", engine_args=args).engine_args.given == args


def test_every_key_is_either_allowed_or_refused() -> None:
    assert not VllmArgs.refused_keys.keys() & VllmArgs.model_fields.keys()
    assert ENTRY_KEYS.keys() <= VllmArgs.model_fields.keys()
    assert set(ENTRY_KEYS.values()) <= ModelConfig.model_fields.keys()


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("trust_remote_code", "code of models is never run here"),
        ("load_format", "only read from safetensors"),
        ("scheduler_cls", "raystream's own stands there"),
        ("logits_processors", "raystream's own stands there"),
        ("worker_cls", "no class of another's runs in the engine"),
        ("hf_overrides", "a model is what its config.json says"),
        ("allowed_local_media_path", "the server reads media itself"),
        ("speculative_config", "no stream could move"),
        ("data_parallel_size", "write `num_replicas`"),
        ("nnodes", "write `distributed_executor_backend: ray`"),
    ],
)
def test_a_key_of_vllms_that_may_not_be_set_is_refused_with_the_reason(key: str, why: str) -> None:
    told = refusal(engine="vllm", engine_args={key: "any"})
    assert f"{key!r} can't be set here" in told
    assert why in told


def test_a_mistyped_key_is_refused_with_the_nearest() -> None:
    told = refusal(engine="vllm", engine_args={"tensor_paralel_size": 2})
    assert "unknown key 'tensor_paralel_size': did you mean 'tensor_parallel_size'?" in told


@pytest.mark.parametrize(
    "args",
    [
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": "two"},
        {"gpu_memory_utilization": 1.5},
        {"max_lora_rank": 5},
        {"quantization": "../fp8"},
        {"limit_mm_per_prompt": {"image": -1}},
        {"cpu_offload_gb": float("inf")},
    ],
)
def test_values_of_a_wrong_type_or_range_are_refused(args: dict[str, Any]) -> None:
    assert refusal(engine="vllm", engine_args=args)


def test_keys_that_the_entry_has_itself_are_put_there() -> None:
    args = {"max_model_len": 4096, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    model = entry(engine="vllm", engine_args=args)
    found = (model.max_model_len, model.max_batched_tokens, model.prefix_caching)
    assert found == (4096, 512, False)
    assert model.engine_args.given == {}
    assert model.has_too_few_tokens(4095)


def test_a_key_in_both_places_is_refused() -> None:
    told = refusal(engine="vllm", max_model_len=8, engine_args={"max_model_len": 8})
    assert "engine_args: max_model_len: the entry has `max_model_len`, too" in told


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"quantization": "int8"}, "engine vllm has no quantization: vLLM finds AWQ"),
        ({"cuda_graphs": False}, "engine vllm has no cuda_graphs: write `engine_args: {enforce"),
        ({"max_stall_ms": 200}, "engine vllm has no max_stall_ms: write a smaller"),
        ({"light_sleep_after_s": 60, "device": "cpu"}, "light_sleep_after_s: vLLM gives no memory"),
        ({"light_sleep_after_s": 60, "num_gpus": 0}, "light_sleep_after_s: vLLM gives no memory"),
        ({"light_sleep_after_s": 60, "task": "embed"}, "of vLLM's models, only those that generat"),
        (
            {"light_sleep_after_s": 60, "engine_urls": ["http://10.0.0.7:8000"]},
            "of vLLM's models, only those that generate in processes of the replica's",
        ),
        ({"task": "embed", "max_num_seqs": 2}, "max_num_seqs"),
    ],
)
def test_keys_of_raystreams_own_engine_are_refused_with_what_to_write(
    keys: dict[str, Any], why: str
) -> None:
    assert why in refusal(engine="vllm", **keys)


@pytest.mark.parametrize(
    "keys", [{"engine_python": "envs/v"}, {"engine_args": {}}, {"exact": True}]
)
def test_keys_of_vllm_are_refused_without_it(keys: dict[str, Any]) -> None:
    assert f"{next(iter(keys))}: write `engine: vllm` too" in refusal(**keys)


@pytest.mark.parametrize("num_gpus", ["auto", 0, 4])
def test_a_divided_model_has_whole_gpus(num_gpus: Any) -> None:
    args = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert entry(engine="vllm", engine_args=args, num_gpus=num_gpus).engine_args.num_workers == 4


@pytest.mark.parametrize("keys", [{"num_gpus": 0.5}, {"num_gpus": 2}, {"gpu_share": 0.5}])
def test_another_number_of_gpus_than_a_model_is_divided_among_is_refused(
    keys: dict[str, Any],
) -> None:
    assert refusal(engine="vllm", engine_args={"tensor_parallel_size": 4}, **keys)


DIVIDED = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"engine_args": {"distributed_executor_backend": "mp"}}, "write tensor_parallel_size or"),
        ({"engine_args": DIVIDED, "task": "embed"}, "only a model that generates"),
        ({"engine_args": DIVIDED, "device": "cpu"}, "Ray starts workers on GPUs only"),
        ({"engine_args": DIVIDED, "num_gpus": 0}, "Ray starts workers on GPUs only"),
        ({"engine_args": DIVIDED, "num_gpus": 1}, "num_gpus must be 'auto', 0 or 2"),
        ({"engine_args": {**DIVIDED, "distributed_executor_backend": "uni"}}, "'mp' or 'ray'"),
    ],
)
def test_what_has_no_workers_on_gpus_is_not_divided_over_nodes(
    keys: dict[str, Any], why: str
) -> None:
    assert why in refusal(engine="vllm", **keys)


def test_a_replica_whose_workers_ray_starts_has_no_gpu_of_its_own() -> None:
    divided = entry(engine="vllm", engine_args=DIVIDED)
    assert ModelSpec(divided, "x", 2.0).num_own_gpus == 0
    on_one_node = entry(engine="vllm", engine_args={"tensor_parallel_size": 2})
    assert ModelSpec(on_one_node, "x", 2.0).num_own_gpus == 2


def test_several_gpus_need_vllm() -> None:
    assert "a replica runs on one GPU, unless `engine: vllm`" in refusal(num_gpus=2)


@pytest.mark.parametrize("share", [{"num_gpus": 0.5}, {"gpu_share": 0.5}])
def test_more_memory_than_the_share_is_refused(share: dict[str, float]) -> None:
    args = {"gpu_memory_utilization": 0.9}
    assert "more than the replica's share" in refusal(engine="vllm", engine_args=args, **share)
    assert entry(engine="vllm", engine_args=args).engine_args.given == args


def test_an_entry_travels_to_the_replicas() -> None:
    model = entry(engine="vllm", engine_args={"max_loras": 2, "cudagraph_capture_sizes": [1, 2]})
    assert pickle.loads(pickle.dumps(model)) == model


def test_adapters_are_of_models_that_generate_on_vllm() -> None:
    adapters = [{"id": "a", "source": "x"}]
    assert entry(engine="vllm", adapters=adapters).adapters[0].source == "x"
    assert "adapters: write `engine: vllm` too" in refusal(adapters=adapters)
    told = refusal(engine="vllm", task="embed", adapters=adapters)
    assert "only a model that generates has them" in told
