"""What Ray Serve refuses only when it deploys a file; `test_check` has what its schema refuses."""

from typing import Any

import pytest
from ray.serve._private.utils import validate_route_prefix

from serve_app.commands.check.ray_check import ROUTE_PREFIX, host_problem
from tests.offenders import for_each
from tests.serve_app.commands.check.test_check import MODEL, problems

APPLICATION = "applications[0]"
OPTIONS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0}
NUMBER = {"env_vars": {"A": 1}}


@pytest.mark.slow
@for_each(
    ({"http": {"port": 70000}}, "http_options.port", "70000 is no port"),
    ({"http": {"port": "70000"}}, "http_options.port", "70000 is no port"),
    ({"http": {"port": 0}}, "http_options.port", "0 is no port"),
    ({"top": {"grpc_options": {"port": 70000}}}, "grpc_options.port", "70000 is no port"),
    ({"http": {"keep_alive_timeout_s": -1}}, "http_options.keep_alive_timeout_s", "negative"),
    ({"http": {"request_timeout_s": -1}}, "http_options.request_timeout_s", "negative"),
    ({"top": {"proxy_location": "Disabled"}}, "proxy_location", "answers no requests"),
    ({"application": {"route_prefix": "llm"}}, f"{APPLICATION}.route_prefix", "mean '/llm'?"),
    ({"application": {"route_prefix": "/a/"}}, f"{APPLICATION}.route_prefix", "mean '/a'?"),
    ({"application": {"route_prefix": "//a"}}, f"{APPLICATION}.route_prefix", "mean '/a'?"),
    ({"application": {"route_prefix": ""}}, f"{APPLICATION}.route_prefix", "mean '/'?"),
    ({"application": {"route_prefix": "/{a}"}}, f"{APPLICATION}.route_prefix", "letters"),
    ({"application": {"route_prefix": "/a b"}}, f"{APPLICATION}.route_prefix", "letters"),
    ({"application": {"route_prefix": None}}, f"{APPLICATION}.route_prefix", "no requests"),
    ({"application": {"name": "a/b"}}, f"{APPLICATION}.name", "'/' or '#'"),
    ({"application": {"name": "a#b"}}, f"{APPLICATION}.name", "'/' or '#'"),
    ({"application": {"runtime_env": NUMBER}}, f"{APPLICATION}.runtime_env", "env_vars"),
    (
        {"model": {"ray_actor_options": {**OPTIONS, "runtime_env": NUMBER}}},
        f"{MODEL}.ray_actor_options.runtime_env",
        "env_vars",
    ),
    (
        {"model": {"ray_actor_options": {**OPTIONS, "num_gpus": 1.5}}},
        f"{MODEL}.ray_actor_options.num_gpus",
        "whole",
    ),
    ({"model": {"ray_actor_options": {**OPTIONS, "resources": {"CPU": 1}}}}, MODEL, "num_cpus"),
    ({"model": {"max_replicas_per_node": 101}}, f"{MODEL}.max_replicas_per_node", "[1, 100]"),
    (
        {"model": {"placement_group_bundles": [{"CPU": 0.5}]}},
        f"{MODEL}.placement_group_bundles",
        "first bundle",
    ),
    (
        {"model": {"placement_group_strategy": "PACK"}},
        f"{MODEL}.placement_group_strategy",
        "must also be provided",
    ),
    (
        {"model": {"deployment_actors": [{"name": "a"}]}},
        f"{MODEL}.deployment_actors[0].actor_class",
        "required",
    ),
)
def test_what_ray_refuses_when_it_deploys_is_refused_before(
    place: Any, path: str, message: str
) -> None:
    (problem,) = problems(**place)
    assert problem.startswith(f"{path}: ")
    assert message in problem
    assert "\n" not in problem


@pytest.mark.slow
@for_each(
    {"http": {"port": "8001"}},
    {"application": {"route_prefix": "/llm"}},
    {"application": {"route_prefix": "/a/b-c.d~1"}},
    {"application": {"runtime_env": {"env_vars": {"A": "1"}, "pip": "/on/the/cluster.txt"}}},
    {"model": {"ray_actor_options": {**OPTIONS, "num_gpus": 2}}},
    {"model": {"placement_group_bundles": [{"CPU": 1}]}},
    {"model": {"num_replicas": "auto"}},
    {"model": {"deployment_actors": [{"name": "a", "actor_class": "no.such:Class"}]}},
)
def test_what_ray_takes_is_no_problem(place: Any) -> None:
    assert problems(**place) == []


def test_one_mistake_is_one_problem() -> None:
    (problem,) = problems(model={"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}})
    assert problem.startswith(f"{MODEL}.autoscaling_config: ")


def test_our_prefixes_are_prefixes_of_ray() -> None:
    for prefix in ("/", "/a", "/a/b", "/a-b/c.d"):
        assert ROUTE_PREFIX.fullmatch(prefix)
        validate_route_prefix(prefix)


HOSTS: dict[str, str | None] = {
    **dict.fromkeys(("127.0.0.1", "127.0.0.2", "10.1.2.3", "0.0.0.0", "::1", "::0", "fd00::2")),
    **dict.fromkeys(("localhost", "server-1.example", "0:0:0:0:0:0:0:0")),
    "::": "write '::0'",
    "::ffff:127.0.0.1": "write '127.0.0.1'",
    "fe80::1": "one network interface",
    "fe80::1%eth0": "one network interface",
    "224.0.0.1": "no address of a single machine",
    "255.255.255.255": "no address of a single machine",
    "ff02::1": "no address of a single machine",
    **dict.fromkeys(("", "300.1.1.1", "127.1", "[::1]", "http://x", "a b", "127.0.0.1:80"), "nor"),
}


@for_each(*HOSTS.items())
def test_a_host_on_which_no_server_can_listen_is_refused(host: str, message: str | None) -> None:
    problem = host_problem(host)
    assert (problem is None) == (message is None)
    assert message is None or message in (problem or "")


def test_the_host_of_a_file_is_checked() -> None:
    (problem,) = problems(http={"host": "[::1]"}, application={"deployments": []})[:1]
    assert problem.startswith("http_options.host: '[::1]' is neither an address nor a name")
