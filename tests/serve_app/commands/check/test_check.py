import copy
import itertools
from contextlib import nullcontext
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.contract.user_config import LEAST, given_settings
from serve_app.commands.check.check import BatchingConfig, find_problems, place
from serve_app.commands.check.preflight import Depth, check_file
from serve_app.commands.check.sleep_check import LOAD_POLICY
from tests.offenders import for_each

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = (ROOT / "serve_config.yaml").read_text(encoding="utf-8")
INGRESS, MODEL = "applications[0].deployments[0]", "applications[0].deployments[1]"
ENTRY = "applications[0].args.models[0]"

Section = dict[str, Any]


def problems(
    *,
    top: Section | None = None,
    http: Section | None = None,
    application: Section | None = None,
    ingress: Section | None = None,
    model: Section | None = None,
    entry: Section | None = None,
) -> list[str]:
    """Return the problems of the shipped file with these keys put into its sections."""
    document = copy.deepcopy(yaml.safe_load(SHIPPED))
    app = document["applications"][0]
    document.update(top or {})
    document["http_options"].update(http or {})
    app["deployments"][0].update(ingress or {})
    app["deployments"][1].update(model or {})
    app["args"]["models"][0].update(entry or {})
    app.update(application or {})
    return find_problems(yaml.safe_dump(document))


def test_shipped_configuration_has_no_problem() -> None:
    assert find_problems(SHIPPED) == []


def test_mistyped_key_is_named_with_its_path_and_the_nearest_known_one() -> None:
    text = SHIPPED.replace("max_replicas: 2", "max_replica: 2")
    assert find_problems(text) == [
        f"{INGRESS}.autoscaling_config.max_replica: "
        "unknown key 'max_replica': did you mean 'max_replicas'?"
    ]


@for_each(
    ({"top": {"loging_config": {}}}, "loging_config", "logging_config"),
    ({"top": {"logging_config": {"encodng": "JSON"}}}, "logging_config.encodng", "encoding"),
    ({"top": {"grpc_options": {"prt": 1}}}, "grpc_options.prt", "port"),
    ({"http": {"hots": "x"}}, "http_options.hots", "host"),
    ({"application": {"rout_prefix": "/"}}, "applications[0].rout_prefix", "route_prefix"),
    ({"application": {"runtime_env": {"pipp": []}}}, "applications[0].runtime_env.pipp", "pip"),
    (
        {"application": {"autoscaling_policy": {"policy_functon": "a:b"}}},
        "applications[0].autoscaling_policy.policy_functon",
        "policy_function",
    ),
    ({"model": {"max_ongoing_request": 1}}, f"{MODEL}.max_ongoing_request", "max_ongoing"),
    (
        {"ingress": {"ray_actor_options": {"num_cpu": 1}}},
        f"{INGRESS}.ray_actor_options.num_cpu",
        "num_cpus",
    ),
    (
        {"ingress": {"request_router_config": {"initial_backof_s": 1}}},
        f"{INGRESS}.request_router_config.initial_backof_s",
        "initial_backoff_s",
    ),
    (
        {"ingress": {"autoscaling_config": {"policy": {"policy_kwarg": {}}}}},
        f"{INGRESS}.autoscaling_config.policy.policy_kwarg",
        "policy_kwargs",
    ),
    ({"model": {"backpressure_config": {"status": 1}}}, f"{MODEL}.backpressure", "status_code"),
    ({"entry": {"max_num_seq": 1}}, f"{ENTRY}.max_num_seq", "max_num_seqs"),
)
def test_unknown_key_of_any_section_is_found(place: Any, path: str, hint: str) -> None:
    (problem,) = problems(**place)
    assert problem.startswith(path)
    assert f"did you mean '{hint}" in problem


@pytest.mark.slow
@for_each(
    ({"http": {"port": "eight"}}, "http_options.port"),
    ({"top": {"proxy_location": "Nowhere"}}, "proxy_location"),
    ({"ingress": {"max_ongoing_requests": 0}}, f"{INGRESS}.max_ongoing_requests"),
    (
        {"ingress": {"autoscaling_config": {"min_replicas": -1}}},
        f"{INGRESS}.autoscaling_config.min_replicas",
    ),
    (
        {"ingress": {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}},
        f"{INGRESS}.autoscaling_config",
    ),
    ({"entry": {"gpu_share": 2}}, f"{ENTRY}.gpu_share"),
    ({"entry": {"num_gpus": "many"}}, f"{ENTRY}.num_gpus"),
    ({"entry": {"max_num_seqs": 2, "max_batched_tokens": 1}}, ENTRY),
    ({"model": {"user_config": {"max_batch_size": 0}}}, f"{MODEL}.user_config.max_batch_size"),
    (
        {"model": {"user_config": {"batch_wait_timeout_s": -1}}},
        f"{MODEL}.user_config.batch_wait_timeout_s",
    ),
    ({"application": {"args": {}}}, "applications[0].args.models"),
    ({"application": {"deployments": {"name": "x"}}}, "applications[0].deployments"),
    ({"application": {"deployments": [None]}}, "applications[0].deployments[0]"),
    ({"application": {"args": {"models": ["pydoc-chat"]}}}, ENTRY),
)
def test_invalid_value_is_found(place: Any, path: str) -> None:
    (problem,) = problems(**place)
    assert problem.startswith(f"{path}: ")


def test_all_problems_are_listed_at_once() -> None:
    found = problems(
        http={"hots": "x", "port": "eight"},
        ingress={"num_replica": 1},
        entry={"max_num_seq": 1, "gpu_share": 2},
    )
    assert [problem.split(": ")[0] for problem in found] == [
        "http_options.hots",
        f"{INGRESS}.num_replica",
        "http_options.port",
        f"{ENTRY}.max_num_seq",
        f"{ENTRY}.gpu_share",
    ]


def test_code_that_the_file_names_is_not_imported() -> None:
    policy = {"policy_function": "no.such.module:policy"}
    assert problems(ingress={"autoscaling_config": {"policy": policy}}) == []


@pytest.mark.parametrize(
    ("kwargs", "key", "message"),
    [
        ({"target_bussy": 1}, "", "did you mean 'target_busy'?"),
        ({"target_busy": "0.9"}, ".target_busy", "valid number"),
        ({"busy_to_leave": 0.9}, "", "busy_to_leave < target_busy"),
    ],
)
def test_arguments_of_our_policy_are_checked(kwargs: Section, key: str, message: str) -> None:
    policy = {"policy_function": LOAD_POLICY, "policy_kwargs": kwargs}
    (problem,) = problems(model={"autoscaling_config": {"policy": policy}})
    assert problem.startswith(f"{MODEL}.autoscaling_config.policy.policy_kwargs{key}: ")
    assert message in problem


def test_user_config_of_a_model_accepts_exactly_its_deployments_keys() -> None:
    assert BatchingConfig.model_fields.keys() == LEAST.keys()
    ones = dict.fromkeys(LEAST, 1)
    assert problems(model={"user_config": ones | {"max_queued_tokens": 1024}}) == []


def test_a_replica_accepts_the_user_config_that_the_check_does() -> None:
    values: list[Any] = [2048, 1, 0, -1, 0.5, 8.0, True, "8", "many", "", [], {}, inf, nan, None]
    for key, value in itertools.product(LEAST, values):
        is_accepted = True
        try:
            BatchingConfig.model_validate({key: value})
        except ValidationError:
            is_accepted = False
        with nullcontext() if is_accepted else pytest.raises(ValueError, match=f"^{key} must be"):
            given_settings({key: value})


def test_a_user_config_with_a_key_of_older_versions_is_refused() -> None:
    (problem,) = problems(model={"user_config": {"max_messages_per_s": 8}})
    assert problem.startswith(f"{MODEL}.user_config: unknown key 'max_messages_per_s'")


def test_a_classifier_refuses_the_keys_of_generation() -> None:
    text = SHIPPED.replace("task: classify\n", "task: classify\n          max_num_seqs: 4\n")
    (problem,) = find_problems(text)
    assert problem.startswith("applications[0].args.models[1]: task 'classify' has no max_num_seqs")


def test_duplicate_key_is_refused() -> None:
    text = SHIPPED.replace("  port: 8000", "  port: 8000\n  port: 8001")
    (problem,) = find_problems(text)
    assert problem == "key 'port' appears twice"
    assert place("f.yaml", text, problem) == "f.yaml:8"


@for_each("", "- 1", "text", "a: [")
def test_text_that_holds_no_mapping_is_one_problem(text: str) -> None:
    assert len(find_problems(text)) == 1


def test_file_without_an_application_of_ours_is_refused() -> None:
    (problem,) = problems(application={"import_path": "other:app"})
    assert problem == "applications: none has the import_path 'serve_app.app:build'"
    (problem,) = problems(application={"import_path": "serve_app.app:bulid"})
    assert problem == (
        "applications[0].import_path: 'serve_app.app:bulid' is not raystream's: did you mean "
        "'serve_app.app:build'?"
    )


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_cpus", "many", "must be auto or a number, not 'many'"),
        ("num_gpus", None, "must be auto or a number, not null"),
        ("gpu_share", 2, "must be auto or less than or equal to 1, not 2"),
        ("num_threads", [2], "must be auto or a whole number, not [2]"),
        ("max_model_len", 1.5, "must be auto or a whole number, not 1.5"),
        ("kv_cache_memory_bytes", "4GiB", "must be auto or a whole number, not '4GiB'"),
    ],
)
def test_a_value_that_is_neither_auto_nor_a_number_is_told_in_one_sentence(
    key: str, value: object, told: str
) -> None:
    assert problems(entry={key: value}) == [f"{ENTRY}.{key}: {told}"]


def test_the_second_model_of_an_id_is_named() -> None:
    (problem,) = problems(entry={"id": "pydoc-search"})
    assert problem == (
        "applications[0].args.models[2].id: model ids must differ; used twice: pydoc-search"
    )


def test_other_applications_are_checked_only_for_rays_keys() -> None:
    other = {
        "name": "other",
        "route_prefix": "/other",
        "import_path": "other:app",
        "args": {"anything": 1},
        "deployments": [{"name": "Anything", "num_replica": 1}],
    }
    ours = yaml.safe_load(SHIPPED)["applications"]
    (problem,) = problems(top={"applications": [*ours, other]})
    assert problem.startswith("applications[1].deployments[0].num_replica: ")


def test_models_may_have_no_deployments_entry() -> None:
    assert problems(application={"deployments": []}) == []
    assert problems(application={"deployments": None}) != []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pydoc_chat", "did you mean 'pydoc-chat'?"),
        ("x", "there are Ingress, KeyLedger, pydoc-chat, pydoc-detector, pydoc-search"),
    ],
)
def test_entry_that_names_no_deployment_is_refused(name: str, hint: str) -> None:
    (problem,) = problems(model={"name": name})
    assert problem.startswith(f"{MODEL}.name: no deployment is called {name!r}: {hint}")


def test_entry_for_a_model_id_with_a_slash_has_dashes() -> None:
    assert problems(entry={"id": "Qwen/Qwen2.5"}, model={"name": "Qwen--Qwen2.5"}) == []
    (problem,) = problems(entry={"id": "Qwen/Qwen2.5"}, model={"name": "Qwen/Qwen2.5"})
    assert "did you mean 'Qwen--Qwen2.5'?" in problem


def test_deployment_that_is_named_twice_is_refused() -> None:
    (problem,) = problems(model={"name": "Ingress", "max_ongoing_requests": 1600})
    assert problem == f"{MODEL}.name: 'Ingress' is used twice"


def test_batch_larger_than_the_requests_that_may_run_is_refused() -> None:
    larger = {"user_config": {"max_batch_size": 200}}
    few = {"max_num_seqs": 16}
    assert problems(model={"max_ongoing_requests": 200, **larger}, entry=few) == []
    (problem,) = problems(model={"max_ongoing_requests": 199, **larger}, entry=few)
    assert problem.startswith(f"{MODEL}.max_ongoing_requests: 199 is less than")


def test_actor_options_of_a_model_must_set_all_that_they_replace() -> None:
    (problem,) = problems(model={"ray_actor_options": {"num_cpus": 1}})
    assert problem.startswith(f"{MODEL}.ray_actor_options: num_gpus is missing. Ray replaces")
    (problem,) = problems(model={"ray_actor_options": {"num_gpus": 0.5}})
    assert problem.startswith(f"{MODEL}.ray_actor_options: num_cpus is missing. Ray replaces")
    assert problems(model={"ray_actor_options": {"num_cpus": 1, "num_gpus": 0}}) == []


@pytest.mark.parametrize("entry", [{"device": "cpu"}, {"num_gpus": 0}])
def test_actor_options_of_a_model_that_needs_no_gpu_may_leave_it_out(entry: Section) -> None:
    assert problems(model={"ray_actor_options": {"num_cpus": 1}}, entry=entry) == []


def test_a_correct_file_is_confirmed_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = str(ROOT / "serve_config.yaml")
    assert check_file(name, Depth.FILE)
    assert capsys.readouterr() == (f"{name}: every key is known and every value is valid\n", "")


def test_there_is_a_line_for_each_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SHIPPED.replace("host:", "hots:").replace("port:", "prot:"), encoding="utf-8")
    assert not check_file(str(path))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "http_options.hots",
        "http_options.prot",
        "applications[0].args.auth",  # without a host, Serve listens on all interfaces
    ]


def test_each_line_names_the_line_of_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    text = SHIPPED.replace("port: 8000", "port: 70000").replace(
        "route_prefix: /", "route_prefix: x"
    )
    text = text.replace("max_surge_percent: 0 ", "max_surge_percent: 101 ").replace(
        "num_cpus: 0.2", "num_cpu: 1"
    )
    path.write_text(text.replace("id: pydoc-search", "source: twice"), encoding="utf-8")
    assert not check_file(str(path))
    assert "appears twice" in capsys.readouterr().err
    path.write_text(text, encoding="utf-8")
    assert not check_file(str(path))
    lines = text.splitlines()
    told = [line.split(": ")[0].rpartition(":") for line in capsys.readouterr().err.splitlines()]
    assert {name for name, _, _ in told} == {str(path)}
    assert [lines[int(number) - 1].split()[0] for _, _, number in told] == [
        "num_cpu:",
        "max_surge_percent:",
        "port:",
        "route_prefix:",
    ]


@pytest.mark.parametrize(
    ("problem", "found"),
    [
        ("a.b: wrong", ":2"),
        ("a.c[1].d: wrong", ":5"),
        ("a.c[1]: wrong", ":5"),
        ("a.c[7]: wrong", ":3"),  # the innermost section that is there
        ("a.x.y: wrong", ":1"),
        ("x: wrong", ""),
        ("wrong", ""),
    ],
)
def test_a_problem_stands_in_the_innermost_section_of_its_path(problem: str, found: str) -> None:
    text = "a:\n  b: 1\n  c:\n  - d: 1\n  - d: 2\n"
    assert place("f.yaml", text, problem) == f"f.yaml{found}"


def test_a_file_that_can_not_be_read_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert not check_file(str(tmp_path / "none.yaml"))
    assert capsys.readouterr().err == f"{tmp_path / 'none.yaml'}: No such file or directory\n"


def test_resources_of_a_replica_whose_workers_ray_starts_are_refused() -> None:
    args = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    application = {
        "import_path": "serve_app.app:build",
        "args": {
            "models": [{"id": "m", "source": "s", "engine": "vllm", "engine_args": args}],
            "auth": {"allow_anonymous": True},
        },
        "deployments": [
            {
                "name": "m",
                "ray_actor_options": {"num_cpus": 1, "num_gpus": 2},
                "max_replicas_per_node": 1,
            }
        ],
    }
    options, per_node = find_problems(yaml.safe_dump({"applications": [application]}))
    assert options.startswith("applications[0].deployments[0].ray_actor_options: leave it out: ")
    assert per_node.startswith("applications[0].deployments[0].max_replicas_per_node: leave it ")


def test_resources_that_take_vllms_environment_away_are_refused_with_what_to_write() -> None:
    model: dict[str, Any] = {"id": "m", "source": "s", "engine": "vllm", "engine_python": "/envs/v"}
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1}
    application = {
        "import_path": "serve_app.app:build",
        "args": {"models": [model], "auth": {"allow_anonymous": True}},
        "deployments": [{"name": "m", "ray_actor_options": options}],
    }
    (problem,) = find_problems(yaml.safe_dump({"applications": [application]}))
    assert problem.startswith("applications[0].deployments[0].ray_actor_options: runtime_env is")
    line = yaml.safe_load(problem.partition("add the line `")[2].removesuffix("`"))
    assert line["runtime_env"]["py_executable"] == "/envs/v/bin/python"
    options |= line
    assert find_problems(yaml.safe_dump({"applications": [application]})) == []
    del options["runtime_env"], model["engine_python"]
    model["engine_urls"] = ["http://127.0.0.1:9"]  # their environment is not ours
    assert find_problems(yaml.safe_dump({"applications": [application]})) == []
