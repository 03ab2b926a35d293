"""What `raystream serve` is asked for, and the configuration that follows from it.

A FILE is served as it is, but for `--host`, `--port` and `--api-key`, which stand in for its own
keys. For models, a file is composed: what their files say, what the options say, and the health
checks and shutdown times of the shipped file. `--save` keeps it, with the keys of the environment.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import yaml

from serve_app.commands.check.model_source import KnownFiles, is_folder, is_path, path_of, read_all
from serve_app.commands.check.source_files import OTHER_FORMATS, ModelFiles, SourceError
from serve_app.config import model_id_of
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE, ApiKeysError, read_environment
from serve_app.strict_yaml import UniqueKeyLoader

BUILDER: Final = "serve_app.app:build"

LOCAL: Final = "127.0.0.1"
PORT: Final = 8000

FILES: Final = (".yaml", ".yml", ".json")
"""How the names of configurations end."""

WEIGHTS: Final = tuple(suffix for suffix, _, _ in OTHER_FORMATS)

MODEL_OPTIONS: Final = (
    "task", "engine", "num_replicas", "num_gpus", "num_cpus", "max_model_len", "save"
)  # fmt: skip
"""What can only be asked for models: a file has these keys itself."""

ENTRY_OPTIONS: Final = ("engine", "num_gpus", "num_cpus", "max_model_len")
"""Options that are keys of each model's entry."""

INGRESS: Final[Mapping[str, Any]] = {
    "name": "Ingress",
    "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 200},
    "max_surge_percent": 100,
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 240,
    "health_check_period_s": 2,
    "health_check_timeout_s": 10,
}
MODEL: Final[Mapping[str, Any]] = {
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 60,
    "health_check_period_s": 2,
    "health_check_timeout_s": 4,
}
"""The sections of the shipped file, whose reasons docs/configuration.md has."""

VLLM_MODEL: Final[Mapping[str, Any]] = {**MODEL, "health_check_timeout_s": 10}
"""A model's section with `engine: vllm`, whose health check may wait for a token of the engine."""

KEY_IN_WORDS: Final = re.compile(r"`(task|engine|num_gpus|num_cpus|max_model_len): (\w+)`")
"""A key of a model's entry in a message, which is an option here."""

MODELS: Final = "applications[0].args.models"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `raystream serve` is asked for; None for what it is not.

    Attributes:
        names: A file, or models: folders and ids of hub repositories.
        host: In place of `http_options.host`.
        port: In place of `http_options.port`.
        task: What the models do.
        engine: What runs them.
        num_replicas: Replicas of each model.
        num_gpus: A model's `num_gpus`.
        num_cpus: A model's `num_cpus`.
        max_model_len: A model's `max_model_len`.
        api_key_sha256: The hash of a key that clients need.
        save: Where the configuration goes.
    """

    names: tuple[str, ...]
    host: str | None = None
    port: int | None = None
    task: str | None = None
    engine: str | None = None
    num_replicas: int | None = None
    num_gpus: str | None = None
    num_cpus: str | None = None
    max_model_len: str | None = None
    api_key_sha256: str | None = None
    save: str | None = None

    @property
    def given(self) -> Mapping[str, Any]:
        """What is asked for, besides the names."""
        values = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def file(self) -> Path | None:
        """The file to serve; None if these are models."""
        return Path(self.names[0]) if len(self.names) == 1 and is_file(self.names[0]) else None

    def misuse(self) -> str | None:
        """Return why the arguments can't be combined; None if they can."""
        files = [name for name in self.names if is_file(name)]
        if not files:
            for name in self.names:
                folder, at, _ = name.partition("@")
                if at and not is_folder(name) and is_folder(folder):
                    return f"{folder} is a folder here, which has no revision; start elsewhere"
            given = [_source_of(name) for name in self.names]
            twice = [
                name for name, each in zip(self.names, given, strict=True) if given.count(each) > 1
            ]
            return f"{twice[0]} is given twice; write --num-replicas 2" if twice else None
        if len(self.names) > 1:
            return f"give either one FILE or models; {files[0]} is a file"
        wrong = [f"--{_option(name)}" for name in MODEL_OPTIONS if name in self.given]
        return f"{files[0]} has {', '.join(wrong)} itself, for each model" if wrong else None

    def arguments(self) -> list[str]:
        """Return the arguments of the driver's command line."""
        return [*(f"--{name}={value}" for name, value in self.given.items()), "--", *self.names]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Return what the driver's command line asks for; see `arguments`."""
        end = arguments.index("--")
        given: dict[str, Any] = dict(
            each.removeprefix("--").split("=", maxsplit=1) for each in arguments[:end]
        )
        for name in ("port", "num_replicas"):
            if name in given:
                given[name] = int(given[name])
        return cls(tuple(arguments[end + 1 :]), **given)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration that is to be served.

    Attributes:
        name: How it is called: its file, or its models.
        text: YAML.
        folder: Where relative paths in it start.
        file: Where the text stands, as far as it is the user's; None if it was composed.
        known: What is known already of the models' files; see `read_all`.
    """

    name: str
    text: str
    folder: Path
    file: Path | None
    known: KnownFiles = field(default_factory=dict)


def is_file(name: str) -> bool:
    """Return whether an argument of `raystream serve` names a configuration, there or not."""
    path = Path(name)
    if is_folder(name) or path.name == "config.json":
        return False
    if path.suffix in FILES:
        return True
    try:
        return path_of(name).is_file() and path.suffix not in (*WEIGHTS, ".safetensors")
    except (OSError, SourceError):  # told of the model
        return False


def configuration(options: ServeOptions) -> Configuration:
    """Return the configuration that is asked for; its faults are found later.

    Raises:
        OSError: The file can't be read.
        UnicodeDecodeError: It is no text.
    """
    file = options.file
    if file is None:
        known = read_all(_source_of(name) for name in options.names)
        text = in_yaml(compose(options, known), options.names)
        commits = {
            (source, files.commit): files
            for (source, _), files in known.items()
            if isinstance(files, ModelFiles)
        }
        return Configuration(", ".join(options.names), text, Path.cwd(), None, {**known, **commits})
    try:
        file = path_of(str(file))
    except SourceError as error:
        raise OSError(str(error)) from error
    text = file.read_text(encoding="utf-8")
    if options.given:
        text = _replaced(text, options)
    return Configuration(str(file), text, file.absolute().parent, file)


def _replaced(text: str, options: ServeOptions) -> str:
    """Return a file's text with the options in place of its keys; the same if it is no mapping."""
    try:
        document = yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError:
        return text  # the check says where
    if not isinstance(document, dict):
        return text
    http = document.get("http_options")
    given = {key: options.given[key] for key in ("host", "port") if key in options.given}
    if given and (http is None or isinstance(http, dict)):
        document["http_options"] = {**(http or {}), **given}
    if options.api_key_sha256 is not None:
        applications = document.get("applications")
        for application in applications if isinstance(applications, list) else ():
            is_ours = isinstance(application, dict) and application.get("import_path") == BUILDER
            args = application.get("args") if is_ours else None
            if isinstance(args, dict) and isinstance(args.get("auth") or {}, dict):
                args["auth"] = {**(args.get("auth") or {}), "api_keys": [_key(options)]}
    return yaml.safe_dump(document, sort_keys=False)


def compose(options: ServeOptions, known: KnownFiles | None = None) -> dict[str, Any]:
    """Return a Serve configuration for models, by what their files and the options say.

    A model that can't be found gets an entry all the same: the check says what is wrong with it.

    Args:
        options: What is asked for.
        known: The models' files; None reads them.
    """
    given = [_source_of(name) for name in options.names]
    found = read_all(given) if known is None else known
    ids = _ids([_path_of(source, found[source, revision]) for source, revision in given])
    models = [
        _entry(id_, source, revision, found[source, revision], options)
        for id_, (source, revision) in zip(ids, given, strict=True)
    ]
    keys = [] if options.api_key_sha256 is None else [_key(options)]
    if options.save is not None:
        keys += _environment_keys(os.environ)
    auth = {"auth": {"api_keys": keys}} if keys else {}
    section = VLLM_MODEL if options.engine == "vllm" else MODEL
    settings = {"num_replicas": options.num_replicas or 1, **section}
    sections = [{"name": id_.replace("/", "--"), **settings} for id_ in ids]
    application = {
        "name": "raystream",
        "route_prefix": "/",
        "import_path": BUILDER,
        "logging_config": {"enable_access_log": False},
        "args": {"models": models, **auth},
        "deployments": [dict(INGRESS), *sections],
    }
    http = {"host": options.host or LOCAL, "port": options.port or PORT}
    return {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}


def _key(options: ServeOptions) -> dict[str, Any]:
    # The user who starts the server is its operator.
    return {"name": "default", "sha256": options.api_key_sha256, "scopes": ["operate"]}


def _environment_keys(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the keys of the environment, so that a saved file serves with them anywhere."""
    try:
        keys = read_environment(environment.get(ENVIRONMENT_VARIABLE, "").strip())
    except ApiKeysError:  # of what is set the check says what is wrong
        return []
    return [{"name": key.name, "sha256": key.sha256} for key in keys]


def _source_of(name: str) -> tuple[str, str | None]:
    """Return the source and the revision that an argument names: FOLDER, ID or ID@REVISION."""
    if is_folder(name) or is_path(name):
        # No matter where it is read, now or when the saved file is served.
        try:
            return str(path_of(name).absolute().resolve()), None
        except (RuntimeError, SourceError):  # the check says why: a loop of links, an unknown user
            return name, None
    source, _, revision = name.partition("@")
    return source, revision or None


def _path_of(source: str, files: ModelFiles | SourceError) -> str:
    """Return what a model's id is taken from."""
    folder = Path(source)
    if not folder.is_absolute():
        is_shipped = isinstance(files, ModelFiles) and files.commit is None
        return Path(source).name if is_shipped else source
    snapshots = folder.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        return snapshots.parent.name.removeprefix("models--").replace("--", "/")
    return source


def _ids(paths: Sequence[str]) -> list[str]:
    """Return an id for each model: a repository's, or a folder's last names, until they differ."""
    ids = [model_id_of(path, 1 if Path(path).is_absolute() else 2) for path in paths]
    for num_parts in range(2, 1 + max(len(Path(path).parts) for path in paths)):
        twice = {id_ for id_ in ids if ids.count(id_) > 1}
        ids = [
            model_id_of(path, num_parts) if id_ in twice and Path(path).is_absolute() else id_
            for id_, path in zip(ids, paths, strict=True)
        ]
    return ids


def _entry(
    id_: str,
    source: str,
    revision: str | None,
    files: ModelFiles | SourceError,
    options: ServeOptions,
) -> dict[str, Any]:
    task, commit = options.task, revision
    if isinstance(files, ModelFiles):
        task = task or files.task
        commit = files.commit or revision
    entry: dict[str, Any] = {
        "id": id_,
        "source": source,
        "revision": commit,
        "task": task or "generate",
    }
    entry |= {"num_gpus": "auto", "num_cpus": "auto", "max_model_len": "auto"}
    entry |= {key: _number(value) for key, value in options.given.items() if key in ENTRY_OPTIONS}
    return {key: value for key, value in entry.items() if value is not None}


def _number(value: str) -> int | float | str:
    """Return an option's number; the text itself if it is none, of which the check says why."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def in_yaml(document: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return a composed configuration as it is saved."""
    return (
        f"# Written by raystream serve {' '.join(' '.join(names).split())}\n"
        "# Serve it by: raystream serve FILE. docs/configuration.md explains every key.\n"
        f"{yaml.safe_dump(dict(document), sort_keys=False)}"
    )


def in_words(problem: str, num_models: int = 1) -> str:
    """Return a problem of a composed configuration in the words of the command line."""
    path, _, message = problem.partition(": ")
    message = KEY_IN_WORDS.sub(lambda found: f"`--{_option(found[1])} {found[2]}`", message)
    key = path.rpartition(".")[2]
    if path.startswith("http_options."):
        return f"--{key}: {message}"
    if ".args.auth" in path:
        return message if message.startswith("API keys: ") else f"{message}; or give --api-key"
    what, advice, _ = message.partition("; write ")
    if key == "task" and advice and num_models > 1:  # the other models may do nothing else
        return f"--task: {what}; leave --task out: each model then does what its files say"
    if path.startswith(MODELS) and key in (*ENTRY_OPTIONS, "task"):
        return f"--{_option(key)}: {message}"
    return message if path.startswith("applications") else problem


def _option(key: str) -> str:
    return key.replace("_", "-")
