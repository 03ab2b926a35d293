"""The checks before Ray starts, which `raystream serve`, `check` and `plan` share.

All faults are found in one go, each with its line in the file: of the file itself (`check`), of the
models' folders and repositories, of the file of keys, and of this machine: its cores and GPUs, its
addresses and ports. Ray and Serve would report them late, verbosely or never: a replica for which
there is no room waits for ever.
"""

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
import yaml
from pydantic import ValidationError
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.serve.schema import HTTPOptionsSchema

from deployments.contract.model_spec import ModelConfig, number
from deployments.contract.strict_model import StrictModel
from serve_app import vllm_environment
from serve_app.commands.check import model_source, source_problems
from serve_app.commands.check.check import find_problems, place
from serve_app.commands.check.compose import BUILDER
from serve_app.commands.check.model_source import KnownFiles
from serve_app.commands.check.ray_check import MAX_PORT, host_problem
from serve_app.commands.check.source_files import SourceError
from serve_app.commands.check.turns import light_groups_in, turn_notes
from serve_app.commands.server_environment import HAPROXY, HAPROXY_PORTS, is_free
from serve_app.config import AppConfig
from serve_app.gpu_shares import known_shares
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE, ApiKeysError, load_api_keys
from serve_app.placement import Demand, Node, demands_of, fits, stated_demands
from serve_app.shipped_files import SHIPPED
from serve_app.strict_yaml import UniqueKeyLoader, why_unreadable

M = TypeVar("M", bound=StrictModel)

OPTIONS: Final = "ray_actor_options"
"""The key of a section of `deployments:` that has the numbers of a replica."""


class Depth(IntEnum):
    """How much is checked: each level has all that is above it."""

    FILE = 1
    """What stands in the file, which may be for another machine."""
    MACHINE = 2
    """Also the models' files, the hub, the file of keys, cores, GPUs and addresses of this machine.
    The server that the file is for may have its port already.
    """
    START = 3
    """Also that the ports are free: the server starts now."""


@dataclass(slots=True)
class Findings:
    """What the checks have found; each line begins with the path of what it speaks of.

    Attributes:
        faults: What keeps the file from being served.
        notes: What does not, unless it is served on this machine now.
    """

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_file(name: str, depth: Depth = Depth.MACHINE) -> bool:
    """Print what is wrong with a file, or that nothing is; return whether it is right."""
    if not is_faultless(name, depth, with_notes=True):
        return False
    sys.stdout.write(f"{name}: every key is known and every value is valid\n")
    return True


def is_faultless(name: str, depth: Depth, *, with_notes: bool = False) -> bool:
    """Print what is wrong with a file to standard error; return whether nothing is."""
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"{name}: {why_unreadable(error)}\n")
        return False
    with chdir(Path(name).parent):  # from which relative paths in the file start
        found = examine(text, depth)
    for kind, lines in (("", found.faults), ("note: ", found.notes if with_notes else ())):
        sys.stderr.writelines(f"{in_file(name, text, each, kind)}\n" for each in lines)
    return not found.faults


def in_file(name: str, text: str, problem: str, kind: str = "") -> str:
    """Return a problem with its place in a file; one of an environment variable has none there."""
    is_variable = problem.partition(": ")[0].isupper()
    return f"{kind}{problem}" if is_variable else f"{place(name, text, problem)}: {kind}{problem}"


def examine(text: str, depth: Depth, known: KnownFiles | None = None) -> Findings:
    """Find everything that is wrong with a Serve configuration.

    Args:
        text: The file's text. Relative paths in it start from the working directory.
        depth: How much is checked.
        known: What is known already of models' files: a silent hub is waited for once.
    """
    found = Findings(find_problems(text))
    if depth == Depth.FILE:
        return found
    try:
        document = yaml.load(text, Loader=UniqueKeyLoader)
    except yaml.YAMLError:
        return found
    if not isinstance(document, dict):
        return found
    applications = document.get("applications")
    machine, asked, has_ours = this_machine(), [], False
    for index, application in enumerate(applications if isinstance(applications, list) else ()):
        if not isinstance(application, dict):
            continue
        path = f"applications[{index}]"
        is_right = not any(each.startswith(f"{path}.deployments") for each in found.faults)
        sections = (application.get("deployments") or ()) if is_right else ()
        name = str(application.get("name", path))
        if application.get("import_path") != BUILDER:
            asked.append(Asked(name, path, stated_demands(sections), _places_of(sections, path)))
            continue
        has_ours = True
        faults, config, has_ledger = _application_faults(application, path, known or {})
        found.faults += faults
        if config is not None:
            found.notes += turn_notes(application, f"{path}.")
        if config is not None and is_right:
            asked.append(
                asked_by(
                    config,
                    sections,
                    machine,
                    path,
                    name=name,
                    has_ledger=has_ledger,
                    light_groups=light_groups_in(application).values(),
                )
            )
    if has_ours:
        found.faults += room_faults(asked, machine)
    _examine_http(document.get("http_options") or {}, found, is_start=depth == Depth.START)
    return found


def _application_faults(
    application: Mapping[str, Any], path: str, known: KnownFiles
) -> tuple[list[str], AppConfig | None, bool]:
    """Return what is wrong with an application, its `args:` if they are right, and `has_ledger`."""
    args = application.get("args")
    models = args.get("models") if isinstance(args, dict) else None
    entries = {
        f"{path}.args.models[{index}]": entry
        for index, given in enumerate(models if isinstance(models, list) else ())
        if (entry := _named(given)) is not None
    }
    faults = list(_source_faults(entries, known))
    config = _valid(AppConfig, args)
    if config is None:
        return faults, None, False
    try:
        keys = load_api_keys(config.auth, SHIPPED, os.environ)
    except ApiKeysError as error:
        keys = None
        where, told = f"{path}.args.auth", str(error)
        if "api_keys_file" in told:
            where += ".api_keys_file"
        is_of_variable = told.startswith(f"{ENVIRONMENT_VARIABLE}: ")
        faults.append(
            told if is_of_variable else f"{where}: {told.removeprefix('auth.api_keys_file: ')}"
        )
    return faults, config, keys is not None and bool(keys.limited)


def _named(given: object) -> ModelConfig | None:
    """Return an entry with the model that another names, whatever is wrong with its other keys."""
    if not isinstance(given, dict):
        return None
    keys = ("source", "revision", "task", "engine", "engine_python", "engine_urls", "max_model_len")
    known = {"id": "m", **{key: given[key] for key in keys if key in given}}
    return _valid(ModelConfig, known) or _valid(ModelConfig, {**known, "max_model_len": "auto"})


def _valid(kind: type[M], given: object) -> M | None:
    """Return a section if it is right in itself."""
    try:
        return kind.model_validate(given)
    except ValidationError:  # found by `find_problems`
        return None


def _source_faults(entries: Mapping[str, ModelConfig], known: KnownFiles) -> Iterator[str]:
    """Yield why models can't be served, by their files; `entries` has their paths."""
    asked = {(each.source, each.revision) for each in entries.values()}
    found = {**known, **model_source.read_all(asked - known.keys())}
    for path, model in entries.items():
        if model.engine == "vllm" and not model.engine_urls:
            missing = vllm_environment.problems(vllm_environment.folder_of(model))
            yield from (f"{path}.engine_python: {each}" for each in missing)
        files = found[model.source, model.revision]
        if isinstance(files, SourceError):
            yield f"{path}.source: {files}"
            continue
        if not model.engine_urls:  # its servers have the weights
            faults = source_problems.problems(files, model.engine)
            yield from (f"{path}.source: {each}" for each in faults)
        if (problem := files.task_problem(model.task)) is not None:
            yield f"{path}.task: {problem}"
        length, most = number(model.max_model_len), files.num_positions
        if model.task == "generate" and length is not None and most is not None and length > most:
            yield (
                f"{path}.max_model_len: {length} is more than the {most} positions of "
                f"{model.source!r}; lower it, or write `max_model_len: auto`"
            )


def this_machine() -> Node:
    """Return what Ray would find here when it starts, by its own function."""
    resources = ResourceAndLabelSpec().resolve(is_head=True, node_ip_address="127.0.0.1")
    found = resources.to_resource_dict()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    return Node(found.get("CPU", 0.0), int(found.get("GPU", 0.0)))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the replicas that an application starts with ask for.

    Attributes:
        name: The application's name.
        path: Its path in the file.
        demands: Of each of its deployments, as far as the file says.
        places: Where the file says it, by deployment.
    """

    name: str
    path: str
    demands: Sequence[Demand]
    places: Mapping[str, str]


def asked_by(
    config: AppConfig,
    deployments: Sequence[Mapping[str, Any]],
    machine: Node,
    path: str,
    *,
    name: str = "",
    has_ledger: bool = False,
    light_groups: Iterable[Sequence[str]] = (),
) -> Asked:
    """Return what an application of raystream asks for.

    Args:
        config: Its `args:`.
        deployments: Its `deployments:`.
        machine: The machine.
        path: See `Asked`.
        name: See `Asked`.
        has_ledger: See `demands_of`.
        light_groups: See `demands_of`.
    """
    shares = known_shares(config.models, machine.num_gpus)
    demands = demands_of(
        config, deployments, shares, has_ledger=has_ledger, light_groups=light_groups
    )
    places = {
        model.deployment_name: f"{path}.args.models[{index}]"
        for index, model in enumerate(config.models)
    }
    return Asked(name, path, demands, places | _places_of(deployments, path))


def _places_of(deployments: Sequence[Mapping[str, Any]], path: str) -> dict[str, str]:
    """Return where Ray takes the numbers of deployments from, if they are there."""
    return {
        str(section.get("name")): f"{path}.deployments[{index}].{OPTIONS}"
        for index, section in enumerate(deployments)
        if section.get(OPTIONS) is not None
    }


def room_faults(asked: Sequence[Asked], machine: Node) -> Iterator[str]:
    """Yield why the replicas that a file starts with have no room on a machine.

    Args:
        asked: What its applications ask for.
        machine: The machine.
    """
    is_full = False
    for each in asked:
        alone = list(_alone_faults(each.demands, machine, each.places))
        yield from alone
        if not alone and not fits(each.demands, [machine]):
            alone = [f"{each.path}.args.models: {_too_many(each.demands, machine)}"]
            yield from alone
        is_full = is_full or bool(alone)
    together = [
        replace(demand, name=f"{each.name}/{demand.name}")
        for each in asked
        for demand in each.demands
    ]
    if not is_full and not fits(together, [machine]):
        yield f"applications: {_too_many(together, machine)}"


def _alone_faults(
    demands: Sequence[Demand], machine: Node, places: Mapping[str, str]
) -> Iterator[str]:
    """Yield which replicas have no room even by themselves."""
    for demand in demands:
        where, each = places.get(demand.name, "applications"), demand.num_gpus
        is_given = where.endswith(OPTIONS)  # where `auto` is no value
        if each > machine.num_gpus:
            has = f"has {machine.num_gpus} GPUs" if machine.num_gpus else "has none that Ray finds"
            yield (
                f"{where}.num_gpus: a replica asks for {each:g} of a GPU, and this machine {has}; "
                f"{'lower it' if is_given else 'write `num_gpus: auto`'}, or install the driver"
            )
        if (demand.num_cpus or 0.0) > machine.num_cpus:
            yield (
                f"{where}.num_cpus: a replica asks for {demand.num_cpus:g} cores, and this machine "
                f"has {machine.num_cpus:g}; "
                f"{'lower it' if is_given else 'write `num_cpus: auto`'}"
            )


def _too_many(demands: Sequence[Demand], machine: Node) -> str:
    """Return the message for replicas that fit by themselves, but not together."""
    for unit, total, advice in (
        ("GPUs", machine.num_gpus, "lower num_gpus or num_replicas"),
        ("cores", machine.num_cpus, "lower num_cpus, or write `num_cpus: auto`"),
    ):
        asked = {
            demand.name: (demand.number, amount)
            for demand in demands
            if (amount := demand.num_gpus if unit == "GPUs" else demand.num_cpus or 0.0)
        }
        together = sum(replicas * amount for replicas, amount in asked.values())
        if together > total:
            each = ", ".join(
                f"{name} {amount:g}" + (f" x {replicas}" if replicas > 1 else "")
                for name, (replicas, amount) in asked.items()
            )
            return (
                f"the replicas ask for {together:g} {unit} together ({each}), and this machine has "
                f"{total:g}: {advice}"
            )
    return (
        f"the replicas find no place beside each other on the {machine.num_gpus} GPUs and "
        f"{machine.num_cpus:g} cores of this machine: lower num_gpus or num_cpus"
    )


def _examine_http(given: object, found: Findings, *, is_start: bool) -> None:
    """Add what is wrong with the addresses and certificates of a file."""
    try:
        known = HTTPOptionsSchema.model_fields
        assert isinstance(given, dict)
        http = HTTPOptionsSchema.model_validate({k: v for k, v in given.items() if k in known})
    except (AssertionError, ValidationError):
        return
    found.faults += certificate_problems(http)
    if not 0 < http.port <= MAX_PORT or host_problem(http.host) is not None:
        return
    for problem in address_problems(http):
        is_taken = problem.startswith("http_options.port: ")
        if is_taken and is_start:
            found.faults.append(f"{problem}; or for this start: --port PORT")
        else:
            (found.notes if is_taken else found.faults).append(problem)
    if is_start:
        found.faults += haproxy_problems(http)


def address_problems(http: HTTPOptionsSchema) -> Iterator[str]:
    """Yield why this machine can't listen on the host and port of a file; nothing if it can."""
    try:
        problem = _port_problem(http.host, http.port)
    except OSError:  # an address of another machine, an unknown name, no IPv6
        yield (
            f"http_options.host: {http.host!r} is no address of this machine, which has "
            f"{', '.join(own_addresses())}"
        )
    else:
        if problem is not None:
            yield f"http_options.port: {problem}"


def _port_problem(host: str, port: int) -> str | None:
    try:
        if is_free(host, port):
            return None
    except PermissionError:
        return f"the system lets only its administrator listen on {port}; choose one from 1024 on"
    return (
        f"{port} is in use on {host}; stop the program that uses it, perhaps another server, or "
        "choose another port"
    )


def certificate_problems(http: HTTPOptionsSchema) -> Iterator[str]:
    """Yield which files for HTTPS are not on this machine."""
    for key in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        file = getattr(http, key)
        if file is not None and not Path(file).is_file():
            yield f"http_options.{key}: {file!r} is no file"


def own_addresses() -> list[str]:
    """Return the machine's addresses on which a server can listen."""
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [address for address in found if host_problem(address) is None]


def haproxy_problems(http: HTTPOptionsSchema) -> Iterator[str]:
    """Yield a line for each setting with which HAProxy's mode can't serve."""
    if os.environ.get(HAPROXY) != "1":
        return
    # Serve's replicas would speak TLS, but HAProxy speaks plain HTTP to them and to clients.
    if http.ssl_certfile is not None:
        yield (
            "http_options.ssl_certfile: HAProxy's mode has no HTTPS; put a proxy with TLS in "
            "front of the server, or leave RAY_SERVE_ENABLE_HA_PROXY out"
        )
    # `raystream serve` has set those that the user has not, to free ports.
    for variable in filter(os.environ.__contains__, HAPROXY_PORTS):
        own = os.environ[variable]
        if not _is_port(own):
            yield f"{variable}: {own!r} is not a port, a number from 1 to 65535"
        elif int(own) == http.port:
            yield f"{variable}: {own} is http_options.port, too; choose another port"
        elif (problem := _port_problem(http.host, int(own))) is not None:
            yield f"{variable}: {problem}"


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdecimal() and 0 < int(value) < 2**16
