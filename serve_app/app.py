"""The composition root: builds the Serve application from `args:` in serve_config.yaml.

Each model gets a deployment named after it; one ingress takes the requests for all of them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeApplicationSchema

from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.user_config import given_settings
from deployments.engine.model.loader import load_config as load_generator_config
from deployments.fleet_generator import FleetGenerator
from deployments.plan.model_shape import ModelShape
from deployments.plan.weight_count import counted_shape
from deployments.pooling.model_outline import load_config as load_pooler_config
from deployments.text_generator import TextGenerator
from deployments.text_pooler import TextPooler
from deployments.vllm_generator import VllmGenerator
from deployments.vllm_pooler import VllmPooler
from serve_app.backends.models.cluster_state import deployed_files
from serve_app.backends.models.model_files import Nodes, unreadable
from serve_app.backends.replicas.model_router import PATH as MODEL_ROUTER
from serve_app.commands.check.check import args_problems
from serve_app.commands.check.model_source import task_of
from serve_app.commands.check.sleep_check import sleep_problems
from serve_app.commands.check.turns import turn_problems
from serve_app.commands.run import worker_logs
from serve_app.commands.run.announcement import Announcement, local_url
from serve_app.commands.server_environment import HAPROXY
from serve_app.config import (
    INGRESS_NAME,
    LEDGER_NAME,
    MODELS_NAME,
    AppConfig,
    AuthConfig,
    model_id_of,
)
from serve_app.deployed_apps import has_args, resolve_num_cpus, turn_groups_of
from serve_app.gpu_shares import resolve_models, to_spec, with_turns
from serve_app.ingress_replica import Ingress, listening_host, listening_options
from serve_app.keys.api_keys import ApiKeysError, KeyRing, load_api_keys
from serve_app.keys.ledger import KeyLedger
from serve_app.middleware.auth import UnprotectedServerError, require_protection
from serve_app.placement import (
    DESCRIBING_NUM_CPUS,
    INGRESS_NUM_CPUS,
)
from serve_app.served_models import ServedModels
from serve_app.shipped_files import SHIPPED
from serve_app.vllm_environment import runtime_env_of

MIN_ONGOING_REQUESTS = 512
"""Ray's routers must not hold a burst back: the model's replica queues and refuses requests."""

LOOPBACK = "127.0.0.1"

UNAUTHENTICATED_RAY = (
    "Ray asks for no token: anyone who can reach one of its ports, or a replica's, can run code on "
    "this machine. Set RAY_AUTH_MODE=token on every node before Ray starts, with the same token on "
    "each (`ray get-auth-token --generate` makes one; a RayService needs only `authOptions: {mode: "
    "token}`). If others can't reach these ports, write "
    "`auth: {allow_unauthenticated_ray: true}`"
)


class RefusedFileError(RayServeException):
    """The file can't be served.

    Serve shows the text of its own errors at once and without a traceback. After another error it
    calls a builder three times more.
    """


class UnauthenticatedRayError(RefusedFileError):
    """Ray runs without token authentication."""


def build(args: AppConfig | Mapping[str, Any]) -> Application:
    """Compose the graph that `import_path` names.

    Args:
        args: The section `args:` of the file. Serve passes it as it is, since the annotation is no
            model: Serve's own validation would end in an error that it does not take for final.

    Raises:
        UnauthenticatedRayError: Ray asks for no token.
        RefusedFileError: The section is wrong, the API keys can't be read, others can reach the
            server and it has no keys, a model's share of a GPU can't be chosen, or a replica would
            fail of what the file says.
    """
    try:
        config = AppConfig.model_validate(args)
    except ValidationError as error:
        problems = args_problems(dict(args), "args")
        raise RefusedFileError("; ".join(problems) or str(error)) from error
    try:
        return _compose(config)
    except (ApiKeysError, UnprotectedServerError) as error:
        raise RefusedFileError(str(error)) from error


def _compose(args: AppConfig) -> Application:
    require_ray_token(args.auth)
    keys = load_api_keys(args.auth, SHIPPED, os.environ)
    host = listening_host()
    # Checked before any model loads. If Serve has not started yet, the ingress checks it.
    if host is not None:
        require_protection(host, keys is not None, args.auth.allow_anonymous)
    handles, specs = _bind_models(args, keys)
    num_ongoing = max(MIN_ONGOING_REQUESTS, args.ongoing_requests)
    num_sockets = args.limits.max_sockets  # each takes a place as long as it is open
    ledger = _bind_ledger(keys, num_ongoing) if keys is not None and keys.limited else None
    ingress = serve.deployment(
        name=INGRESS_NAME,
        max_ongoing_requests=num_ongoing + num_sockets,
        ray_actor_options={"num_cpus": INGRESS_NUM_CPUS},
    )(Ingress)
    announcement = _announcement(args, has_keys=keys is not None)
    return ingress.bind(args, handles, keys, ledger, specs, announcement)


def build_app(
    models: Sequence[ModelConfig | Mapping[str, Any] | str], *, http: bool = True, **args: Any
) -> Application:
    """Compose an application of models, to be run by `serve.run`, or bound into another graph.

    Args:
        models: Entries of `models:`, or sources: of these, the id is the last part of the name. The
            task of an entry without one is found from the model's files.
        http: Whether the application serves HTTP. Without it, the application can be bound in a
            graph that has an ingress of its own, and its models are asked by `raystream.Model`.
        **args: The other sections of `args:`, such as limits and auth.

    Raises:
        TypeError: One model is given in place of a list.
        pydantic.ValidationError: A section or an entry is wrong.
        Exception: See `build`.
    """
    if isinstance(models, str | Mapping | ModelConfig):
        raise TypeError("build_app takes a list of models: put the one into []")
    config = AppConfig.model_validate({"models": [_entry(each) for each in models], **args})
    if http:
        return build(config)
    require_ray_token(config.auth)
    handles, specs = _bind_models(config)
    deployment = serve.deployment(
        name=MODELS_NAME, ray_actor_options={"num_cpus": DESCRIBING_NUM_CPUS}
    )(ServedModels)
    return deployment.bind(config, handles, specs)


def _entry(model: ModelConfig | Mapping[str, Any] | str) -> ModelConfig | dict[str, Any]:
    if isinstance(model, ModelConfig):
        return model
    entry = {"id": model_id_of(model), "source": model} if isinstance(model, str) else dict(model)
    if "task" not in entry and isinstance(entry.get("source"), str):
        entry["task"] = task_of(entry["source"], entry.get("revision"))
    return entry


def _bind_models(
    args: AppConfig, keys: KeyRing | None = None
) -> tuple[dict[str, Application], list[ModelSpec]]:
    """Bind a deployment for each model, by its id; return them with what their replicas know.

    Raises:
        RefusedFileError: A model's share of a GPU can't be chosen, or a replica would fail of what
            the file says.
    """
    tracing, aging_s = args.tracing.settings, args.limits.priority_aging_s
    try:
        resolved = resolve_models(args.models, _num_cluster_gpus(), _read_shape)
    except ValueError as error:
        raise RefusedFileError(str(error)) from error
    # A model that is not told of its light group would hold memory in the turns of the others.
    may_be_light = any(model.may_sleep_lightly for model in args.models)
    files = list(deployed_files(has_to_answer=may_be_light))
    specs = {
        id_: replace(spec, tracing=tracing, priority_aging_s=aging_s)
        for id_, spec in resolved.items()
    }
    try:
        group_of = turn_groups_of(args, files)
        for name in set(group_of.values()):
            specs |= with_turns(specs, name, [id_ for id_ in group_of if group_of[id_] == name])
    except ValueError as error:
        raise RefusedFileError(str(error)) from error
    require_startable(args, specs.values(), files)
    num_cpus = resolve_num_cpus(args, specs, files, keys)
    handles = {
        model.id: _bind(model, specs[model.id], num_cpus[model.deployment_name])
        for model in args.models
    }
    return handles, list(specs.values())


def _announcement(args: AppConfig, *, has_keys: bool) -> Announcement | None:
    """Return what the ingress logs when the server is ready; None if `raystream serve` shows it.

    With several nodes the ingress may not reach the port of the head, and users ask a balancer.
    """
    http = listening_options()
    if http is None or worker_logs.is_set_up() or len(ray.nodes()) > 1:  # type: ignore[no-untyped-call] # Ray leaves it untyped
        return None
    context = ray.get_runtime_context()
    files = (each for each in deployed_files() if has_args(each, args))
    prefix = next((each.route_prefix for each in files), None) or "/"
    return Announcement(
        url=local_url(
            http.host or LOOPBACK, http.port, prefix, has_tls=http.ssl_certfile is not None
        ),
        models=args.models,
        needs_key=has_keys,
        dashboard_url=None,  # Ray shows it itself
        logs=str(Path(context.get_temp_dir(), context.get_session_name(), "logs", "serve")),
        has_haproxy=os.environ.get(HAPROXY) == "1",
        is_driven=False,
    )


def require_startable(
    args: AppConfig,
    specs: Iterable[ModelSpec],
    files: Iterable[ServeApplicationSchema],
    nodes: Nodes | None = None,
) -> None:
    """Refuse a file of which replicas would fail, before Serve stops others for them.

    Args:
        args: The `args:` of the application that is built.
        specs: Its models.
        files: See `user_config_problems`.
        nodes: See `unreadable`.

    Raises:
        RefusedFileError: One line names all mistakes.
    """
    files = list(files)
    problems = [
        *user_config_problems(args, files),
        *(
            problem
            for file in files
            if has_args(file, args)
            for find in (turn_problems, sleep_problems)
            for problem in find(file.model_dump(exclude_unset=True), args)
        ),
        *unreadable(specs, nodes),
    ]
    if problems:
        raise RefusedFileError("; ".join(problems))


def user_config_problems(args: AppConfig, files: Iterable[ServeApplicationSchema]) -> Iterator[str]:
    """Yield what is wrong in the `user_config` of models.

    Args:
        args: The `args:` of the application that is built.
        files: Applications as they are deployed, with their `args:`; those with others are not it.
    """
    names = {model.deployment_name for model in args.models}
    sections = [each for file in files if has_args(file, args) for each in file.deployments]
    for section in sections:
        given = section.model_dump(exclude_unset=True).get("user_config")
        if section.name in names and given is not None:
            try:
                given_settings(given)
            except ValueError as error:
                yield f"{section.name}: user_config: {error}"


def require_ray_token(auth: AuthConfig) -> None:
    """Refuse to serve on a Ray without token authentication, unless the owner allows that.

    A replica unpickles what other replicas send to its port, so only Ray's token tells them from
    strangers. Permission to serve HTTP without keys is not a permission for this.

    Raises:
        UnauthenticatedRayError: Ray asks for no token.
    """
    # The mode that a replica's server reads, too. Ray passes it to all processes of a node.
    if not (auth.allow_unauthenticated_ray or is_token_auth_enabled()):
        raise UnauthenticatedRayError(UNAUTHENTICATED_RAY)


def _bind_ledger(keys: KeyRing, num_ongoing: int) -> Application:
    """Bind the ledger: one replica, since counts must be kept in one place."""
    deployment = serve.deployment(
        name=LEDGER_NAME,
        num_replicas=1,
        max_ongoing_requests=num_ongoing,
        ray_actor_options={"num_cpus": DESCRIBING_NUM_CPUS},
        health_check_period_s=2,
    )(KeyLedger)
    return deployment.bind(keys.limited)


def _bind(model: ModelConfig, spec: ModelSpec, num_cpus: float) -> Application:
    options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": spec.num_own_gpus}
    if model.engine == "vllm" and not model.engine_urls:
        options["runtime_env"] = runtime_env_of(model)
    deployment = serve.deployment(
        name=model.deployment_name,
        max_ongoing_requests=max(MIN_ONGOING_REQUESTS, model.ongoing_requests()),
        ray_actor_options=options,
        request_router_config={"request_router_class": MODEL_ROUTER},
        **placement_of(model, num_cpus),
    )(_replica_of(model))
    return deployment.bind(spec)


def placement_of(model: ModelConfig, num_cpus: float) -> dict[str, Any]:
    """Return what a deployment asks for beside its replicas: a GPU for each worker of Ray's.

    vLLM takes bundles of one GPU. The replica is in the first, and must hold no GPU itself: its
    worker there would never find one. Ray puts as many on a node as it can.
    """
    if not model.engine_args.uses_ray:
        return {}
    first, *others = ({"GPU": 1.0} for _ in range(model.engine_args.num_workers))
    return {
        "placement_group_bundles": [{"CPU": num_cpus, **first}, *others],
        "placement_group_strategy": "PACK",
    }


def _replica_of(model: ModelConfig) -> type:
    if model.engine_urls:
        return FleetGenerator
    if model.engine == "vllm":
        return VllmGenerator if model.task == "generate" else VllmPooler
    return TextGenerator if model.task == "generate" else TextPooler


def _num_cluster_gpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    return resources.get("GPU", 0.0)


def _read_shape(model: ModelConfig) -> ModelShape:
    """Read a model's sizes as `raystream plan` does; a hub's configuration is downloaded.

    Raises:
        ValueError: It can't be read; the message says what to write instead.
    """
    is_pooler = model.task != "generate"
    load_config = load_pooler_config if is_pooler else load_generator_config
    source, revision = to_spec(model, 0).source, model.revision
    try:
        config = load_config(source, revision=revision)
        return counted_shape(config, source, revision, is_pooler=is_pooler)
    except ValueError as error:
        raise ValueError(f"gpu_share: auto: {error}; or write a number") from error
