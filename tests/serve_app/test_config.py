from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.contract.model_spec import GENERATION_KEYS, ONGOING_MARGIN, ModelConfig
from deployments.contract.strict_model import unknown_key_message
from deployments.contract.telemetry.tracing import TracingSettings
from serve_app.config import (
    INGRESS_NAME,
    AppConfig,
    AuthConfig,
    CorsConfig,
    LimitsConfig,
    TracingConfig,
)
from serve_app.shipped_files import CONFIG
from tests.offenders import for_each


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": "tiny", "source": "models/tiny", **changes})


def test_the_nearest_known_key_is_suggested() -> None:
    assert unknown_key_message("max_lenght", ["max_length", "id"]) == (
        "unknown key 'max_lenght': did you mean 'max_length'?"
    )


def test_known_keys_are_listed_when_none_is_near() -> None:
    assert unknown_key_message("zzz", ["id", "dtype"]) == "unknown key 'zzz': known keys: dtype, id"


def test_every_unknown_key_of_a_section_is_named() -> None:
    with pytest.raises(ValidationError, match=r"'sorce': did you mean 'source'.*'idd'"):
        ModelConfig.model_validate({"idd": "tiny", "sorce": "models/tiny"})


def test_unknown_section_is_refused() -> None:
    with pytest.raises(ValidationError, match="did you mean 'limits'"):
        AppConfig.model_validate({"models": [model()], "limit": {}})


def test_the_shipped_file_names_every_limit_with_its_default() -> None:
    shipped = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    limits = shipped["applications"][0]["args"]["limits"]
    assert list(limits) == list(LimitsConfig.model_fields)
    assert LimitsConfig.model_validate(limits) == LimitsConfig()


def test_model_needs_only_an_id_and_a_source() -> None:
    config = ModelConfig(id="tiny", source="models/tiny")
    assert (config.task, config.device, config.num_gpus) == ("generate", "auto", "auto")


@pytest.mark.parametrize("num_gpus", ["auto", 0, 0.5, 1])
def test_num_gpus_is_auto_or_a_share_of_one(num_gpus: float | str) -> None:
    assert model(num_gpus=num_gpus).num_gpus == num_gpus


@for_each(
    {"num_gpus": -1},
    {"num_gpus": 2},
    {"num_gpus": float("nan")},
    {"num_gpus": "some"},
    {"gpu_share": 0},
    {"gpu_share": 1.5},
    {"num_cpus": -1},
    {"task": "translate"},
    {"dtype": "int8"},
    {"device": "tpu"},
    {"quantization": "int3"},
    {"tool_call_parser": "pythonic"},
    {"reasoning_parser": "granite"},
    {"source": ""},
    {"max_model_len": 1},
    {"max_num_seqs": 0},
    {"max_queued_requests": -1},
    {"max_queued_tokens": -1},
)
def test_value_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**changes)


ALIEN_1: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"max_num_seqs": 16},
    {"prefix_caching": False},
    {"cuda_graphs": True},
    {"tool_call_parser": "auto"},
    {"reasoning_parser": "auto"},
]


@for_each(*((task, alien) for task in ("classify", "embed") for alien in ALIEN_1))
def test_a_key_that_only_a_generator_has_a_use_for_is_refused_by_name(
    task: str, alien: dict[str, Any]
) -> None:
    (key,) = alien
    with pytest.raises(ValidationError, match=f"task '{task}' has no {key}; leave that out"):
        model(task=task, **alien)
    assert model(task=task).task == task
    assert set(alien) <= set(GENERATION_KEYS)


def test_a_classifier_s_micro_batches_need_not_hold_many_texts() -> None:
    assert model(task="classify", max_batched_tokens=1).max_batched_tokens == 1


def test_a_classifier_s_replica_accepts_a_running_batch_and_a_full_queue() -> None:
    counted = model(task="classify", max_queued_requests=16)
    assert counted.ongoing_requests() == 16 + 1 + 16 + ONGOING_MARGIN
    assert counted.ongoing_requests(0) == 1 + ONGOING_MARGIN


@pytest.mark.parametrize(
    "where", [{}, {"device": "cpu"}, {"num_gpus": 0}, {"device": "cpu", "num_gpus": 0.5}]
)
def test_quantization_is_allowed_if_the_model_may_run_on_a_cpu(where: dict[str, Any]) -> None:
    assert model(quantization="int4", **where).quantization == "int4"
    assert model(**where).quantization is None


@pytest.mark.parametrize("where", [{"device": "cuda"}, {"num_gpus": 0.5}])
def test_int8_weights_on_a_gpu_are_refused_when_the_file_is_checked(where: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="'int8' runs only on a CPU; write `device: cpu`"):
        model(quantization="int8", **where)
    assert model(**where).quantization is None


@pytest.mark.parametrize("where", [{"device": "cuda"}, {"num_gpus": 0.5}])
def test_only_a_model_that_generates_sleeps_lightly_on_a_gpu(where: dict[str, Any]) -> None:
    assert model(light_sleep_after_s=60, **where).light_sleep_after_s == 60
    for task in ("classify", "embed"):
        with pytest.raises(ValidationError, match="sleeps lightly only on a CPU; write `device: "):
            model(light_sleep_after_s=60, task=task, **where)


@for_each("", "-x", "a b", "ü", "a?b", "x" * 97)
def test_id_that_is_not_a_valid_deployment_name_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        model(id=name)


def test_a_step_must_hold_a_token_of_every_sequence() -> None:
    assert model(max_num_seqs=8, max_batched_tokens=8).max_batched_tokens == 8
    with pytest.raises(ValidationError, match=r"max_batched_tokens \(7\) must be at least"):
        model(max_num_seqs=8, max_batched_tokens=7)


def test_deployment_is_named_after_the_id_without_slashes() -> None:
    assert model(id="Qwen/Qwen2.5-7B-Instruct").deployment_name == "Qwen--Qwen2.5-7B-Instruct"


def test_two_models_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="used twice: a--b"):
        AppConfig(models=(model(id="a/b"), model(id="a--b")))


def test_an_adapter_s_id_is_no_other_s() -> None:
    adapters = [{"id": "a", "source": "x"}, {"id": "b", "source": "x"}]
    with pytest.raises(ValidationError, match=r"of models and adapters must differ.*: b"):
        AppConfig(models=(model(id="m", engine="vllm", adapters=adapters), model(id="b")))
    with pytest.raises(ValidationError, match=r"of models and adapters must differ.*: a"):
        AppConfig(models=(model(id="m", engine="vllm", adapters=adapters[:1] * 2),))


def test_a_model_can_not_have_the_ingress_s_name() -> None:
    with pytest.raises(ValidationError, match="'Ingress' is the ingress's own name"):
        AppConfig(models=(model(id="Ingress"),))


def test_at_least_one_model_is_asked_for() -> None:
    with pytest.raises(ValidationError):
        AppConfig(models=())


def test_configuration_can_not_be_changed() -> None:
    with pytest.raises(ValidationError):
        model().id = "other"


@for_each(
    {"max_body_bytes": 1},
    {"max_num_images": -1},
    {"first_token_timeout_s": 0},
    {"stall_timeout_s": -1},
    {"total_timeout_s": 0},
    {"slow_reader_timeout_s": 0},
)
def test_limit_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LimitsConfig.model_validate(changes)


def test_the_longest_request_must_fit_into_the_queue() -> None:
    with pytest.raises(ValidationError, match="99 is less than max_model_len"):
        model(max_model_len=100, max_queued_tokens=99)
    assert model(max_model_len=100, max_queued_tokens=100).max_queued_tokens == 100
    assert model(max_queued_tokens=None).max_queued_tokens is None


def test_a_replica_accepts_more_calls_than_it_admits() -> None:
    counted = model(max_num_seqs=8, max_queued_requests=16)
    assert counted.ongoing_requests() == 24 + ONGOING_MARGIN
    assert counted.ongoing_requests(0) == 8 + ONGOING_MARGIN


@for_each(
    {"otlp_endpoint": "collector:4318"},
    {"otlp_endpoint": "http://user:password@collector:4318"},
    {"otlp_endpoint": "http://collector:4318/?key=secret"},
    {"otlp_endpoint": ""},
    {"sample_ratio": 1.5},
    {"sample_ratio": -0.1},
)
def test_a_collector_s_url_has_no_credentials_and_a_ratio_is_a_part(
    changes: dict[str, object],
) -> None:
    with pytest.raises(ValidationError):
        TracingConfig.model_validate(changes)


def test_the_shipped_file_has_no_traces() -> None:
    shipped = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    tracing = shipped["applications"][0]["args"]["tracing"]
    assert list(tracing) == list(TracingConfig.model_fields)
    assert TracingConfig.model_validate(tracing) == TracingConfig()


def test_traces_are_off_until_there_is_an_endpoint() -> None:
    assert TracingConfig().settings is None
    endpoint = "https://collector.example:4318/base"
    config = TracingConfig(otlp_endpoint=endpoint, sample_ratio=0.25)
    assert config.settings == TracingSettings(endpoint, 0.25)


@for_each(
    ["chat.example.org"],
    ["https://chat.example.org/"],
    ["https://*.example.org"],
    ["*", "https://chat.example.org"],
)
def test_an_origin_is_a_scheme_and_a_host_or_any_alone(origins: list[str]) -> None:
    with pytest.raises(ValidationError):
        CorsConfig.model_validate({"allowed_origins": origins})
    CorsConfig.model_validate({"allowed_origins": ["https://a.test", "http://localhost:3000"]})


def test_the_shipped_file_runs_on_two_cores_with_room_for_a_roll_out() -> None:
    shipped = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    (application,) = shipped["applications"]
    deployments = {each["name"]: each for each in application["deployments"]}
    ingress = deployments[INGRESS_NAME]
    reserved = (
        ingress["ray_actor_options"]["num_cpus"] * ingress["autoscaling_config"]["max_replicas"]
    )
    for model in application["args"]["models"]:
        assert "ray_actor_options" not in deployments[model["id"]]
        reserved += (
            model["num_cpus"] * deployments[model["id"]]["autoscaling_config"]["min_replicas"]
        )
    assert reserved <= 1.6


def test_every_deadline_may_be_left_out() -> None:
    names = ("first_token_timeout_s", "stall_timeout_s", "total_timeout_s", "slow_reader_timeout_s")
    limits = LimitsConfig.model_validate(dict.fromkeys(names))
    assert [getattr(limits, name) for name in names] == [None] * 4


def test_objectives_without_a_trusted_gateway_are_refused() -> None:
    given = AuthConfig.model_validate({"trusted_gateway": True, "objectives": {"batch": 5}})
    assert given.objectives == {"batch": 5}
    with pytest.raises(ValidationError, match="no effect without trusted_gateway: true"):
        AuthConfig.model_validate({"objectives": {"batch": 5}})
    for wrong in ({"": 1}, {"batch": 0.5}, {"batch": 2**31}, {"a" * 254: 1}):
        with pytest.raises(ValidationError):
            AuthConfig.model_validate({"trusted_gateway": True, "objectives": wrong})
