"""Part of `raystream check`: finds mistakes in a Serve configuration, wherever it will be served.

Ray silently accepts a mistyped key, and checks some sections only on the cluster. The whole file is
checked here: its YAML (no key twice), the keys and values of Ray's sections, also what
Ray refuses only when it deploys them (`ray_check`), `args:` by `serve_app.config`, and what the two
must agree on. `preflight` adds what this machine tells: the models' files, its cores and ports.
"""

import json
import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from textwrap import shorten
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError
from ray.runtime_env import RuntimeEnv
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import HTTPOptionsSchema, ServeDeploySchema

from deployments.autoscaling import LoadPolicy
from deployments.contract.model_spec import ModelConfig
from deployments.contract.strict_model import StrictModel, unknown_key_message
from serve_app.commands.check.compose import BUILDER
from serve_app.commands.check.queue_check import ingress_queue_problems, queue_problems
from serve_app.commands.check.ray_check import application_problems, server_problems
from serve_app.commands.check.sleep_check import LOAD_POLICY, sleep_problems
from serve_app.commands.check.turns import turn_problems
from serve_app.config import INGRESS_NAME, LEDGER_NAME, AppConfig
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE
from serve_app.middleware.auth import UnprotectedServerError, require_protection
from serve_app.strict_yaml import UniqueKeyLoader, in_words, line_of
from serve_app.vllm_environment import runtime_env_of

OWN_NAMES = (INGRESS_NAME, LEDGER_NAME)

BUFSIZE: Final = "RAY_SERVE_HAPROXY_TUNE_BUFSIZE"

ROOM_BYTES: Final = 8 * 2**10
"""What the buffer holds beyond names and values: 1 KiB that HAProxy keeps free for rewriting, the
request line with its path, and what separates the headers, at most 101 of them.
"""

KINDS: Final = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "text",
    "none": "null",
}
"""What a value must be, by the first word of the type of pydantic's error."""

# Sections that are plain mappings in Ray's schema, although Ray reads only these keys.
MAPPING_KEYS = {
    "autoscaling_policy": list(AutoscalingPolicy.model_fields),
    # A set, whose order differs between processes: the schema beside a file must stay the same.
    "runtime_env": sorted(key for key in RuntimeEnv.known_fields if not key.startswith("_")),
}
# Sections that Ray's schema does not check: the model, and the key whose value Ray would import.
UNCHECKED_SECTIONS: dict[str, tuple[type[BaseModel], str]] = {
    "autoscaling_config": (AutoscalingConfig, "policy"),
    "request_router_config": (RequestRouterConfig, "request_router_class"),
}


class LoadPolicyConfig(StrictModel):
    """The `policy_kwargs` of `LoadPolicy`, with its defaults."""

    target_busy: float = Field(default=LoadPolicy.target_busy, strict=True)
    """Replicas are added until all sequences that run, wait or were refused in the last 5 s would
    fill this part of `max_num_seqs` of each, or what runs this part of the KV memory. Of a model
    that classifies or embeds, this part of `max_batched_tokens`.
    """
    busy_to_leave: float = Field(default=LoadPolicy.busy_to_leave, strict=True)
    """A replica is stopped if the others are no busier than this without it."""
    target_waiting_tokens: float = Field(default=LoadPolicy.target_waiting_tokens, strict=True)
    """Waiting tokens for which one more replica is added: choose what one replica computes
    in a few seconds.
    """


class BatchingConfig(StrictModel):
    """The `user_config` of a model's deployment; None keeps the deployment's own default."""

    max_batch_size: int | None = Field(default=None, ge=1, strict=True)
    """Requests that are tokenized in one call. null is 32."""
    batch_wait_timeout_s: float | None = Field(default=None, ge=0, allow_inf_nan=False, strict=True)
    """Time that the first of these requests waits for others. null is 0: requests gather while the
    tokenizer is busy.
    """
    max_queued_requests: int | None = Field(default=None, ge=0, strict=True)
    """In place of the model entry's. null keeps the entry's."""
    max_queued_tokens: int | None = Field(default=None, ge=0, strict=True)
    """In place of the model entry's. null keeps the entry's."""


def place(name: str, text: str, problem: str) -> str:
    """Return a file's name, with the line of what a problem speaks of."""
    line = line_of(text, _path_in(problem))
    return name if line is None else f"{name}:{line}"


def _path_in(problem: str) -> str:
    """Return the path with which a problem begins."""
    return problem.partition(": ")[0]


def find_problems(text: str) -> list[str]:
    """Return one line for each mistake in a Serve configuration; each begins with its path."""
    try:
        document = yaml.load(text, Loader=UniqueKeyLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        return [in_words(error)]
    if not isinstance(document, dict):
        return ["the file must hold a mapping with the key 'applications'"]
    misshapen = list(_misshapen_sections(document, ServeDeploySchema, ""))
    if misshapen:
        return misshapen  # Ray's validators and ours rely on the shape
    problems = list(_unknown_keys(document, ServeDeploySchema, ""))
    known = _without_unknown_keys(document, ServeDeploySchema)
    invalid = _invalid_values(known, ServeDeploySchema, "")
    invalid += _invalid_unchecked_values(known)
    reported = [_path_in(problem) for problem in invalid]
    # What Ray refuses later is often refused for the same value.
    invalid += [
        problem
        for problem in _later_problems(known)
        if not any(path.startswith(_path_in(problem)) for path in reported)
    ]
    return problems + invalid + _application_problems(document)


def _later_problems(document: dict[str, Any]) -> Iterator[str]:
    """Yield what Ray refuses only when it deploys a file in the shape of its schema."""
    yield from server_problems(document)
    for index, application in enumerate(document.get("applications") or []):
        is_ours = application.get("import_path") == BUILDER
        yield from application_problems(application, f"applications[{index}]", is_ours=is_ours)


def _sections(value: Any, annotation: Any, path: str) -> Iterator[tuple[str, Any, type[BaseModel]]]:
    """Yield (path, value, model) for every section in the annotation, from the top down."""
    model = _model_in(annotation)
    if model is None or value is None:
        return
    is_list = any(get_origin(part) in (list, tuple) for part in (annotation, *get_args(annotation)))
    if is_list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _section(item, model, f"{path}[{index}]")
    elif is_list:
        yield path, None, model
    else:
        yield from _section(value, model, path)


def _section(
    value: Any, model: type[BaseModel], path: str
) -> Iterator[tuple[str, Any, type[BaseModel]]]:
    yield path, value, model
    if isinstance(value, dict):
        for key, field in model.model_fields.items():
            yield from _sections(value.get(key), field.annotation, _join(path, key))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _misshapen_sections(value: Any, model: type[BaseModel], path: str) -> Iterator[str]:
    for where, section, _ in _sections(value, model, path):
        if not isinstance(section, dict):
            yield f"{where}: must be a mapping, or a list of mappings if several are allowed"


def _unknown_keys(value: Any, model: type[BaseModel], path: str) -> Iterator[str]:
    for where, section, section_model in _sections(value, model, path):
        refused = getattr(section_model, "refused_keys", None)  # Ray's sections have none
        yield from _keys_outside(section, list(section_model.model_fields), where, refused)
        for key, known in MAPPING_KEYS.items():
            if isinstance(section.get(key), dict):
                yield from _keys_outside(section[key], known, _join(where, key))


def _keys_outside(
    section: dict[str, Any], known: list[str], path: str, refused: Mapping[str, str] | None = None
) -> Iterator[str]:
    for key in map(str, section):
        if key not in known:
            yield f"{_join(path, key)}: {unknown_key_message(key, known, refused)}"


def _without_unknown_keys(value: Any, model: type[BaseModel]) -> Any:
    """Return a copy for further checks, also without keys whose code Ray would run."""
    copy = deepcopy(value)
    for _, section, section_model in _sections(copy, model, ""):
        for key in [key for key in section if key not in section_model.model_fields]:
            del section[key]
        for key, (_, code) in UNCHECKED_SECTIONS.items():
            if isinstance(section.get(key), dict):
                section[key].pop(code, None)
    return copy


def _invalid_values(section: Any, model: type[BaseModel], path: str) -> list[str]:
    try:
        model.model_validate(deepcopy(section))  # some of Ray's validators change their input
    except ValidationError as error:
        items: dict[str, list[Any]] = {}
        for item in _innermost(error.errors()):
            items.setdefault(_path_of(item, section, path), []).append(item)
        return [f"{where}: {_message(found)}" for where, found in items.items()]
    return []


def _message(items: list[Any]) -> str:
    """Return what is wrong with a value; of a union there is an error for each of its kinds."""
    wanted = dict.fromkeys(map(_wanted, items))
    if len(wanted) > 1 and None not in wanted:
        value = items[0]["input"]
        given = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
        return f"must be {' or '.join(filter(None, wanted))}, not {shorten(given, 80)}"
    return ", or: ".join(_one_line(item["msg"].removeprefix("Value error, ")) for item in items)


def _wanted(item: Any) -> str | None:
    """Return what one kind of a union takes; None if its error does not say so."""
    kind = item["type"]
    if kind == "literal_error":
        return str(item["ctx"]["expected"]).replace("'", "")
    if kind.startswith(("greater_than", "less_than")):
        return str(item["msg"]).removeprefix("Input should be ")
    return KINDS.get(kind.partition("_")[0])


def _innermost(errors: list[Any]) -> list[Any]:
    """Drop errors of a section if a part of it has one: a list reports bad items as missing."""
    locations = [error["loc"] for error in errors]
    return [
        error
        for error in errors
        if not any(
            len(other) > len(error["loc"]) and other[: len(error["loc"])] == error["loc"]
            for other in locations
        )
    ]


def _path_of(error: Any, section: Any, path: str) -> str:
    """Return the part of an error's location that is in the file; pydantic adds union branches."""
    for step in (*error["loc"], *error.get("ctx", {}).get("place", ())):
        if isinstance(section, list) and isinstance(step, int):
            path, section = f"{path}[{step}]", section[step]
        elif isinstance(section, dict) and (step in section or error["type"] == "missing"):
            path, section = _join(path, str(step)), section.get(step)
    return path


def _invalid_unchecked_values(document: dict[str, Any]) -> Iterator[str]:
    for path, section, _ in _sections(document, ServeDeploySchema, ""):
        for key, (model, _) in UNCHECKED_SECTIONS.items():
            if isinstance(section.get(key), dict):
                yield from _invalid_values(section[key], model, _join(path, key))


def _protection_problem(document: dict[str, Any], config: AppConfig, path: str) -> Iterator[str]:
    """Yield the error that `require_protection` would raise at startup, if any.

    The file of keys is not read: it may be on another machine.
    """
    host = (document.get("http_options") or {}).get("host", HTTPOptionsSchema().host)
    auth = config.auth
    has_keys = bool(auth.api_keys or auth.api_keys_file or os.environ.get(ENVIRONMENT_VARIABLE))
    try:
        require_protection(host, has_keys, auth.allow_anonymous)
    except UnprotectedServerError as error:
        yield f"{path}.args.auth: {error}"


def _application_problems(document: dict[str, Any]) -> list[str]:
    """Return the mistakes in each raystream application: in `args:`, and in its deployments."""
    applications = document.get("applications") or []
    ours = [(i, app) for i, app in enumerate(applications) if app.get("import_path") == BUILDER]
    if not ours:
        for index, application in enumerate(applications):
            given = str(application.get("import_path"))
            if get_close_matches(given, [BUILDER]):
                where = f"applications[{index}].import_path"
                return [f"{where}: {given!r} is not raystream's: did you mean {BUILDER!r}?"]
        return [f"applications: none has the import_path {BUILDER!r}"]
    return [
        problem
        for index, application in ours
        for problem in _our_problems(document, application, f"applications[{index}]")
    ]


def _our_problems(document: dict[str, Any], application: dict[str, Any], path: str) -> list[str]:
    args = {} if application.get("args") is None else application["args"]
    problems, config = _read_args(args, f"{path}.args")
    if config is not None:
        problems += _deployment_problems(application, config, path)
        problems += turn_problems(application, config, f"{path}.")
        problems += sleep_problems(application, config, f"{path}.")
        problems += _protection_problem(document, config, path)
        problems += header_problems(config, path, os.environ)
    return problems


def args_problems(args: Any, path: str) -> list[str]:
    """Return one line for each mistake in the section `args:` of an application.

    Args:
        args: The section.
        path: Where it is in the file; each line begins with it.
    """
    return _read_args(args, path)[0]


def _read_args(args: Any, path: str) -> tuple[list[str], AppConfig | None]:
    """Return the mistakes in a section `args:`, and what it says if only unknown keys are wrong."""
    misshapen = list(_misshapen_sections(args, AppConfig, path))
    if misshapen:
        return misshapen, None
    unknown = list(_unknown_keys(args, AppConfig, path))
    known = _without_unknown_keys(args, AppConfig)
    invalid = _invalid_values(known, AppConfig, path)
    return unknown + invalid, None if invalid else AppConfig.model_validate(known)


def header_problems(config: AppConfig, path: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the mistake if HAProxy's buffer, where it is set, is too small for our limit.

    HAProxy refuses headers that do not fit into it with an answer of its own, in HTML. In a larger
    buffer, headers beyond `limits.max_header_bytes` get our 431 in JSON.

    Source: https://docs.haproxy.org/2.8/configuration.html#tune.bufsize and tune.maxrewrite
    """
    bufsize = environment.get(BUFSIZE, "")
    max_header_bytes = config.limits.max_header_bytes
    if bufsize.isdecimal() and int(bufsize) < max_header_bytes + ROOM_BYTES:
        yield (
            f"{path}.args.limits.max_header_bytes: {max_header_bytes} does not fit into HAProxy's "
            f"buffer of {bufsize} bytes ({BUFSIZE}, see serve.env), which needs {ROOM_BYTES} more; "
            "HAProxy would refuse such headers with an answer of its own, in HTML"
        )


def _deployment_problems(
    application: dict[str, Any], config: AppConfig, path: str
) -> Iterator[str]:
    models = {model.deployment_name: model for model in config.models}
    seen = set()
    for index, deployment in enumerate(application.get("deployments") or []):
        where = f"{path}.deployments[{index}]"
        name = str(deployment.get("name"))
        if name in seen:
            yield f"{where}.name: {name!r} is used twice"
        seen.add(name)
        if name in models:
            yield from _model_deployment_problems(deployment, models[name], where)
        elif name == INGRESS_NAME:
            yield from ingress_queue_problems(deployment, config, where)
        elif "name" in deployment and name != LEDGER_NAME:
            yield f"{where}.name: {_unknown_deployment_message(name, [*OWN_NAMES, *models])}"


def _unknown_deployment_message(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"no deployment is called {name!r}: {hint} (a model's deployment has its id, / as --)"


def _model_deployment_problems(
    deployment: dict[str, Any], model: ModelConfig, path: str
) -> Iterator[str]:
    user_config = deployment.get("user_config") or {}
    wrong = _invalid_values(user_config, BatchingConfig, f"{path}.user_config")
    yield from wrong
    if not wrong:
        yield from queue_problems(deployment, model, user_config, path)
    scaling = deployment.get("autoscaling_config") or {}
    yield from _policy_problems(scaling.get("policy") or {}, f"{path}.autoscaling_config.policy")
    options = deployment.get("ray_actor_options")
    if model.engine_args.uses_ray:
        yield from _placement_problems(deployment, path)
    elif options is not None:
        yield from _resource_problems(options, model, f"{path}.ray_actor_options")


def _policy_problems(policy: dict[str, Any], path: str) -> Iterator[str]:
    """Yield what is wrong with the arguments of our own policy, which Ray passes on unread."""
    if policy.get("policy_function") != LOAD_POLICY:
        return
    kwargs, where = policy.get("policy_kwargs") or {}, f"{path}.policy_kwargs"
    wrong = _invalid_values(kwargs, LoadPolicyConfig, where)
    yield from wrong
    if not wrong:
        try:
            LoadPolicy(**kwargs)
        except ValueError as error:
            yield f"{where}: {error}"


def _placement_problems(deployment: dict[str, Any], path: str) -> Iterator[str]:
    """Yield what can't be said of a model whose workers Ray starts, in a group of its own."""
    why = {
        "ray_actor_options": "the replica has no GPU of its own, and `num_cpus` is a key of the "
        "model's entry",
        "max_replicas_per_node": "a replica may be on several nodes",
    }
    for key, reason in why.items():
        if deployment.get(key) is not None:
            yield (f"{path}.{key}: leave it out: with `distributed_executor_backend: ray` {reason}")


def _resource_problems(options: dict[str, Any], model: ModelConfig, path: str) -> Iterator[str]:
    needs_gpu = model.device != "cpu" and model.num_gpus != 0
    for key in ("num_cpus", "num_gpus") if needs_gpu else ("num_cpus",):
        if options.get(key) is None:
            yield (
                f"{path}: {key} is missing. Ray replaces both num_cpus and num_gpus of the model's "
                f"entry by this section: set {key} here too, or leave the section out"
            )
    runs_elsewhere = model.engine == "vllm" and not model.engine_urls
    if runs_elsewhere and not (options.get("runtime_env") or {}).get("py_executable"):
        yield (
            f"{path}: runtime_env is missing. Ray replaces the environment of vLLM by this "
            "section, too: leave the section out, or add the line `runtime_env: "
            f"{json.dumps(runtime_env_of(model))}`"
        )


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _one_line(message: str) -> str:
    return " ".join(message.split())
