from importlib import reload
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fastapi import FastAPI
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app as build_of_serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeApplicationSchema

import deployments
import serve_app
from deployments.contract.model_spec import ModelConfig
from deployments.vllm_generator import VllmGenerator
from deployments.vllm_pooler import VllmPooler
from serve_app import app, deployed_apps
from serve_app.commands.check.turns import TURN_POLICY
from serve_app.commands.run import worker_logs
from serve_app.commands.run.announcement import Announcement
from serve_app.commands.server_environment import HAPROXY
from serve_app.config import AppConfig, AuthConfig
from serve_app.gpu_shares import to_spec
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE
from tests.serve_app.deployed_file import ARGS, deployed
from tests.serve_app.fake_nodes import Cluster


def test_a_ray_without_token_is_refused_and_public_http_is_no_consent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: False)
    with pytest.raises(app.UnauthenticatedRayError, match="RAY_AUTH_MODE=token"):
        app.require_ray_token(AuthConfig(allow_anonymous=True))
    app.require_ray_token(AuthConfig(allow_unauthenticated_ray=True))


def test_a_ray_with_a_token_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: True)
    app.require_ray_token(AuthConfig())


GREEDY = {"id": "greedy", "source": "models/pydoc-chat", "num_gpus": 1}
BESIDE = {"id": "beside", "source": "models/pydoc-chat", "gpu_share": "auto"}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (deployed({"max_batch_size": 8}), []),
        (deployed(None), []),
        (deployed({"max_batch_size": "many"}), ["a--m: user_config: max_batch_size must be a"]),
        (deployed({"max_batch_sise": 8}), ["a--m: user_config: unknown keys: max_batch_sise"]),
        # Others that Serve runs beside it.
        (deployed({"x": 1}, args={"models": [{"id": "a/m", "source": "x"}]}), []),
        (deployed({"x": 1}, args={"any": "thing"}), []),
    ],
)
def test_a_wrong_user_config_is_found_in_the_file_that_is_built(
    file: ServeApplicationSchema, expected: list[str]
) -> None:
    found = list(app.user_config_problems(AppConfig.model_validate(ARGS), [file]))
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))


def test_a_file_whose_replicas_would_fail_is_refused_in_one_line() -> None:
    args = AppConfig.model_validate(ARGS)
    (model,) = args.models
    app.require_startable(args, [to_spec(model, 0.0)], [deployed({})], nodes=Cluster())
    missing = to_spec(model.model_copy(update={"source": "/nowhere/at/all"}), 0.0)
    with pytest.raises(app.RefusedFileError) as error:
        app.require_startable(args, [missing], [deployed({"max_batch_size": 0})], nodes=Cluster())
    assert str(error.value) == (
        "a--m: user_config: max_batch_size must be a whole number of at least 1, and is 0; "
        "a/m: can't load '/nowhere/at/all': there is no such folder"
    )


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"models": [], "limit": {}},
            "args.limit: unknown key 'limit': did you mean 'limits'?; args.models",
        ),
        (ARGS | {"models": ["m"]}, "args.models[0]: must be a mapping"),
        (
            {"models": [{**ARGS["models"][0], "max_queud_requests": 3}]},
            "args.models[0].max_queud_requests: unknown key 'max_queud_requests': did you mean "
            "'max_queued_requests'?",
        ),
        (ARGS | {"auth": {"api_keys_file": "/nowhere.yaml"}}, "auth.api_keys_file: /nowhere.yaml"),
        (ARGS | {"models": [GREEDY, BESIDE]}, "the GPUs are given away"),
    ],
)
def test_serve_shows_at_once_why_it_can_not_serve_a_file(
    args: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve takes its own errors for final, and shows their text without a traceback."""
    monkeypatch.setattr(app, "_num_cluster_gpus", lambda: 1.0)
    builder: Any = app.build
    with pytest.raises(RayServeException) as error:
        call_user_app_builder_with_args_if_necessary(builder, args)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_cluster")
def test_serve_shows_at_once_that_a_public_server_needs_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "listening_host", lambda: "0.0.0.0")
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    with pytest.raises(RayServeException, match="allow_anonymous"):
        app.build(ARGS)


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose applications without a Ray, which would start in this process when asked."""
    monkeypatch.setattr(app, "is_token_auth_enabled", lambda: True)
    monkeypatch.setattr(app, "_num_cluster_gpus", lambda: 0.0)
    monkeypatch.setattr(app, "listening_host", lambda: "127.0.0.1")
    monkeypatch.setattr(app, "listening_options", lambda: None)
    monkeypatch.setattr(app, "require_startable", lambda *_: None)
    monkeypatch.setattr(app, "deployed_files", lambda **_: ())
    monkeypatch.setattr(deployed_apps, "running_demands", dict)
    monkeypatch.setattr(deployed_apps, "RayNodes", Cluster)


def names_in(application: Application) -> set[str]:
    built = build_of_serve(application, name="mine")
    built.validate_single_fastapi_ingress()
    return {deployment.name for deployment in built.deployments}


@pytest.mark.usefixtures("no_cluster")
def test_models_are_composed_from_their_sources_alone() -> None:
    made = app.build_app(["models/pydoc-chat", ModelConfig(id="b", source="org/b")])
    assert names_in(made) == {"Ingress", "pydoc-chat", "b"}
    assert names_in(app.build_app(["org/my model"])) == {"Ingress", "my-model"}


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("named", ["models/pydoc-detector", {"id": "pydoc-detector"}])
def test_the_task_of_a_composed_model_is_found_from_its_files(named: Any) -> None:
    if isinstance(named, dict):
        named["source"] = "models/pydoc-detector"
    built = build_of_serve(app.build_app([named]), name="mine")
    (model,) = (each for each in built.deployments if each.name == "pydoc-detector")
    assert getattr(model.func_or_class, "__name__", "") == "TextPooler"


@pytest.mark.usefixtures("no_cluster")
def test_models_without_http_are_bound_in_a_graph_with_an_ingress_of_its_own() -> None:
    class Mine:
        def __init__(self, models: object) -> None:
            pass

    models = app.build_app([{"id": "a/m", "source": "models/pydoc-chat"}], http=False)
    mine = serve.deployment(name="Mine")(serve.ingress(FastAPI())(Mine))
    assert names_in(mine.bind(models)) == {"Mine", "ServedModels", "a--m"}


@pytest.mark.usefixtures("no_cluster")
def test_a_wrong_argument_is_refused_as_in_the_file() -> None:
    with pytest.raises(ValidationError, match="did you mean 'limits'"):
        app.build_app(["models/pydoc-chat"], limit={})
    one: Any = "pydoc-chat"
    with pytest.raises(TypeError, match="takes a list of models"):
        app.build_app(one)


@pytest.fixture
def serve_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Serve run, as `serve run` starts it."""
    options = HTTPOptions(host="0.0.0.0", port=8123)
    context = SimpleNamespace(get_temp_dir=lambda: "/tmp/ray", get_session_name=lambda: "session_1")
    files = [deployed(None, route_prefix="/llm")]
    monkeypatch.setattr(app, "listening_options", lambda: options)
    monkeypatch.setattr(app, "deployed_files", lambda: files)
    monkeypatch.setattr(ray, "nodes", lambda: [{}])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.delenv(HAPROXY, raising=False)


def announced() -> Announcement | None:
    return app._announcement(AppConfig.model_validate(ARGS), has_keys=False)


@pytest.mark.usefixtures("serve_on_one_node")
def test_under_serve_run_the_ingress_says_where_the_server_is_and_that_haproxy_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = announced()
    assert found is not None
    text = found.text(3.0)
    assert "raystream is ready after 3 s: http://127.0.0.1:8123/llm\n" in text
    assert "Warning: HAProxy does not stand in front" in text
    assert "/tmp/ray/session_1/logs/serve" in text
    monkeypatch.setenv(HAPROXY, "1")
    found = announced()
    assert found is not None
    assert "Warning" not in found.text(3.0)


@pytest.mark.usefixtures("serve_on_one_node")
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (worker_logs, "is_set_up", True),  # `raystream serve` shows it itself
        (ray, "nodes", [{}, {}]),
        (app, "listening_options", None),
    ],
)
def test_elsewhere_the_ingress_announces_nothing(
    module: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, lambda: value)
    assert announced() is None


@pytest.mark.usefixtures("no_cluster")
def test_models_of_a_light_group_know_it_and_divide_what_one_of_them_reserves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = ["a/m", "b", "alone"]
    args = {"models": [{**ARGS["models"][0], "id": id_} for id_ in ids]}
    kwargs = {"groups": {"cpu": ids[:2]}, "light": ["cpu"]}
    policy = {"policy_function": TURN_POLICY, "policy_kwargs": kwargs}
    file = deployed(None, args=args, autoscaling_policy=policy)
    monkeypatch.setattr(app, "deployed_files", lambda **_: iter([file, deployed(None)]))
    handles, specs = app._bind_models(AppConfig.model_validate(args))
    assert [spec.turn_group for spec in specs] == ["cpu", "cpu", None]
    found: Any = [handles[id_]._bound_deployment for id_ in ids]
    assert [each.ray_actor_options["num_cpus"] for each in found] == [0.25, 0.25, 0.5]


@pytest.mark.usefixtures("no_cluster")
def test_serve_shows_at_once_that_two_applications_can_not_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"models": [{**ARGS["models"][0], "id": id_} for id_ in ("a", "b")]}
    kwargs = {"groups": {"cpu": ["a", "b"]}, "light": ["cpu"]}
    policy = {"policy_function": TURN_POLICY, "policy_kwargs": kwargs}
    light = deployed(None, args=args, name="light", autoscaling_policy=policy)
    files = [light, deployed(None, args=args, name="other")]
    monkeypatch.setattr(app, "deployed_files", lambda **_: files)
    with pytest.raises(RayServeException, match="the applications 'light' and 'other' have the"):
        app.build(args)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("num_gpus", "is_refused"), [((1, 1), False), ((1, 0.5), True), (("auto", "auto"), True)]
)
def test_models_of_a_light_group_on_a_gpu_divide_its_card_and_say_how_much_they_use(
    monkeypatch: pytest.MonkeyPatch, num_gpus: tuple[float | str, ...], is_refused: bool
) -> None:
    entry = {**ARGS["models"][0], "light_sleep_after_s": 60, "device": "auto"}
    entry |= {"gpu_share": 1} if is_refused else {}
    ids = ["a", "b"]
    models = [{**entry, "id": id_, "num_gpus": n} for id_, n in zip(ids, num_gpus, strict=True)]
    args = {"models": models}
    kwargs = {"groups": {"card": ids}, "light": ["card"]}
    policy = {"policy_function": TURN_POLICY, "policy_kwargs": kwargs}
    file = deployed(None, args=args, autoscaling_policy=policy)
    monkeypatch.setattr(app, "deployed_files", lambda **_: [file])
    monkeypatch.setattr(app, "_num_cluster_gpus", lambda: 1.0)
    config = AppConfig.model_validate(args)
    if is_refused:
        with pytest.raises(app.RefusedFileError, match="use the same part of one GPU"):
            app._bind_models(config)
        return
    handles, specs = app._bind_models(config)
    found: Any = [handles[id_]._bound_deployment for id_ in ids]
    assert [each.ray_actor_options["num_gpus"] for each in found] == [0.5, 0.5]
    assert [(spec.num_own_gpus, spec.device_share) for spec in specs] == [(0.5, 1.0)] * 2


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("after_s", [None, 60.0])
def test_a_model_that_may_sleep_lightly_is_bound_only_if_its_group_can_be_known(
    monkeypatch: pytest.MonkeyPatch, after_s: float | None
) -> None:
    asked: list[bool] = []

    def files(*, has_to_answer: bool = False) -> tuple[()]:
        asked.append(has_to_answer)
        return ()

    monkeypatch.setattr(app, "deployed_files", files)
    entry = {**ARGS["models"][0], "light_sleep_after_s": after_s}
    app._bind_models(AppConfig.model_validate({"models": [entry]}))
    assert asked == [after_s is not None]


def test_a_package_that_hides_ours_in_a_process_of_ray_s_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployments, "__file__", "/work/deployments/__init__.py")
    with pytest.raises(ImportError, match=r"/work/deployments/__init__\.py hides raystream's own"):
        reload(serve_app)


def test_a_model_whose_workers_ray_starts_gets_a_bundle_for_each_and_no_gpu_itself() -> None:
    args = {"pipeline_parallel_size": 3, "distributed_executor_backend": "ray"}
    entry = {"id": "m", "source": "x", "engine": "vllm", "engine_args": args}
    model = ModelConfig.model_validate(entry)
    bound: Any = app._bind(model, to_spec(model, 3.0), 0.5)._bound_deployment
    config = bound._replica_config
    assert (config.ray_actor_options["num_cpus"], config.ray_actor_options["num_gpus"]) == (0.5, 0)
    assert config.placement_group_bundles == [{"CPU": 0.5, "GPU": 1}, {"GPU": 1}, {"GPU": 1}]
    assert config.placement_group_strategy == "PACK"


def test_a_model_of_vllm_is_bound_to_its_environment() -> None:
    entry = {"id": "m", "source": "x", "engine": "vllm", "engine_python": "/envs/v"}
    model = ModelConfig.model_validate({**entry, "engine_args": {"tensor_parallel_size": 2}})
    bound: Any = app._bind(model, to_spec(model, 2.0), 0.5)._bound_deployment
    options = bound.ray_actor_options
    assert issubclass(bound.func_or_class, VllmGenerator)
    assert (options["num_cpus"], options["num_gpus"]) == (0.5, 2.0)
    assert options["runtime_env"]["py_executable"] == "/envs/v/bin/python"
    pooler = ModelConfig.model_validate({**entry, "task": "embed"})
    bound = app._bind(pooler, to_spec(pooler, 0), 0.5)._bound_deployment
    assert issubclass(bound.func_or_class, VllmPooler)
