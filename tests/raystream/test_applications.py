"""How `Model` finds an application, and follows what is deployed."""

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve as serve_api
from ray._private import ray_constants
from ray.exceptions import AuthenticationError
from ray.serve.exceptions import RayServeException

import raystream.applications as module
from deployments.contract.errors import ModelNotFoundError, ReplicaUnavailableError
from raystream.applications import Applications, connect, find_application, reaching
from serve_app.commands.run.server_record import FoundServer, ServerRecord
from serve_app.config import AppConfig
from serve_app.served_models import ApplicationDescription
from tests.failing import failing

Deployments = Mapping[str, tuple[str, ...]]


def description(*ids: str) -> ApplicationDescription:
    models = [{"id": id_, "source": "nowhere"} for id_ in ids]
    return ApplicationDescription(AppConfig.model_validate({"models": models}), ())


class FakeServe:
    """Serve's controller with some applications."""

    def __init__(self, applications: Deployments) -> None:
        self.applications = applications
        self.own: str | None = None
        self.described = description("m")
        self.described_by: dict[str, ApplicationDescription] = {}
        self.refusal: Exception | None = None
        self.num_asked = 0

    def overview(self) -> Mapping[str, Any]:
        return {
            name: SimpleNamespace(deployments=dict.fromkeys(names))
            for name, names in self.applications.items()
        }

    def replica_context(self) -> Any:
        if self.own is None:
            raise RayServeException("no replica")
        return SimpleNamespace(app_name=self.own)

    def handle(self, deployment: str, application: str) -> Any:
        return FakeHandle(deployment, application)

    async def describe(self, name: str) -> ApplicationDescription:
        self.num_asked += 1
        if self.refusal is not None:
            raise self.refusal
        return self.described_by.get(name, self.described)


class FakeHandle(SimpleNamespace):
    def __init__(self, deployment: str, application: str) -> None:
        super().__init__(deployment_name=deployment, app_name=application)

    def options(self, **options: object) -> object:
        return self


async def forever(_: object) -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeServe]:
    fake = FakeServe({"raystream": ("Ingress", "m"), "mine": ("Story",)})
    monkeypatch.setattr(module, "_overview", fake.overview)
    monkeypatch.setattr(module, "describe", fake.describe)
    monkeypatch.setattr(serve_api, "get_replica_context", fake.replica_context)
    monkeypatch.setattr(serve_api, "get_deployment_handle", fake.handle)
    monkeypatch.setattr("serve_app.served_models.watch_draining_nodes", forever)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    yield fake
    watching = [task for task in asyncio.all_tasks() if "_watch" in str(task.get_coro())]
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    module._applications.clear()


def test_the_only_application_that_serves_the_model_is_found(serve: FakeServe) -> None:
    assert find_application("m") == "raystream"
    serve.applications = {"bound": ("Story", "ServedModels", "org--m")}
    assert find_application("org/m") == "bound"
    assert find_application(None) == "bound"


def test_a_model_that_none_serves_is_named_with_the_applications(serve: FakeServe) -> None:
    with pytest.raises(ModelNotFoundError, match=r"No application serves 'n' here\..*: raystream"):
        find_application("n")


def test_of_several_the_caller_s_own_is_taken_or_else_none(serve: FakeServe) -> None:
    serve.applications = {"a": ("Ingress", "m"), "b": ("Ingress", "m")}
    with pytest.raises(ModelNotFoundError, match=r"a, b\. Say which by .*application='a'"):
        find_application("m")
    serve.own = "b"
    assert find_application("m") == "b"


async def test_an_application_is_asked_once_and_again_when_its_file_changes(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    applications = Applications()
    first = await applications.of("m", None)
    assert await applications.of("m", "raystream") is first
    assert serve.num_asked == 1
    serve.described = description("m", "n")
    new = await applications.of("n", "raystream")
    assert new is not first
    assert await applications.of("m", None) is new
    monkeypatch.setattr(module, "MAX_AGE_S", -1.0)
    serve.described = description("m", "o")
    assert await applications.of("m", None) is new, "requests don't wait"
    await asyncio.gather(*applications._asking.values())
    assert (await applications.of("m", None)).serves("o")


async def test_connections_of_an_earlier_file_close_with_their_last_request(
    serve: FakeServe,
) -> None:
    async with reaching("m", None) as context:
        applications = module._applications[asyncio.get_running_loop()]
        first = await applications.of("m", None)
        assert context is first.context
        serve.described = description("m", "n")
        async with reaching("n", "raystream"):
            assert not first._watching.cancelling()
    async with asyncio.timeout(10):
        await asyncio.wait([first._watching])
    assert first._watching.cancelled()


async def test_an_application_that_is_gone_is_looked_for_anew(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    applications = Applications()
    await applications.of("m", None)
    monkeypatch.setattr(module, "MAX_AGE_S", -1.0)
    serve.refusal = ReplicaUnavailableError("gone")
    await applications.of("m", None)
    await asyncio.gather(*applications._asking.values())
    serve.refusal = None
    serve.applications = {"moved": ("Ingress", "m")}
    assert (await applications.of("m", None)).serves("m")
    assert list(applications._open) == ["moved"]


async def test_a_model_that_has_moved_to_another_application_is_found_there(
    serve: FakeServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    applications = Applications()
    first = await applications.of("m", None)
    serve.applications = {"raystream": ("Ingress", "n"), "other": ("Ingress", "m")}
    serve.described_by = {"raystream": description("n"), "other": description("m")}
    monkeypatch.setattr(module, "MAX_AGE_S", -1.0)
    assert await applications.of("m", None) is first, "what is asked now is not known yet"
    await asyncio.gather(*applications._asking.values())
    monkeypatch.setattr(module, "MAX_AGE_S", 10.0)
    found = await applications.of("m", None)
    assert applications._open["other"] is found
    num_asked = serve.num_asked
    assert await applications.of("m", None) is found
    assert serve.num_asked == num_asked
    serve.applications = {"other": ("Ingress", "m")}
    assert not (await applications.of("m", "raystream")).serves("m"), "as it was asked"


async def test_a_model_of_an_application_that_is_deleted_is_found_in_another(
    serve: FakeServe,
) -> None:
    applications = Applications()
    applications._homes["m"] = "deleted"
    described = serve.describe

    async def describe(name: str) -> ApplicationDescription:
        if name == "deleted":
            raise ModelNotFoundError("no such application")
        return await described(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "describe", describe)
        assert await applications.of("m", None) is applications._open["raystream"]


def test_without_a_server_an_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", failing(ConnectionError("no Ray")))
    monkeypatch.setattr(module, "own_servers", lambda _: [])
    with pytest.raises(ReplicaUnavailableError, match="start a server by `raystream serve`"):
        connect(environment={})
    with pytest.raises(ReplicaUnavailableError, match=r"at 10\.0\.0\.1:6379 can't be joined"):
        connect(environment={"RAY_ADDRESS": "10.0.0.1:6379"})

    monkeypatch.setattr(ray, "init", failing(AuthenticationError("no token")))
    with pytest.raises(ReplicaUnavailableError, match="set RAY_AUTH_MODE=token"):
        connect(environment={})


def server(url: str, address: str | None, *, is_alive: bool = True) -> FoundServer:
    record = ServerRecord(1, 1.0, ("serve",), "f.yaml", url, None, "/token", address)
    return FoundServer(Path("/tmp"), record, is_alive)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses that are joined; none is."""
    joined: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: joined.append(address))
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    return joined


def test_a_program_joins_the_only_server_of_its_user_with_its_token(
    joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, starting = server("http://h:1", "h:1", is_alive=False), server("http://h:2", None)
    found = [dead, starting, server("http://h:3", "127.0.0.1:3")]
    monkeypatch.setattr(module, "own_servers", lambda _: found)
    environment: dict[str, str] = {}
    connect(environment=environment)
    assert joined == ["127.0.0.1:3"]
    assert environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/token"}
    assert not ray_constants.ENABLE_RAY_CLUSTER, "else Ray would look for it in the network"


def test_of_several_servers_the_environment_says_which(
    joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [server("http://h:1", "10.0.0.1:1"), server("http://h:2", "10.0.0.1:2")]
    monkeypatch.setattr(module, "own_servers", lambda _: found)
    with pytest.raises(ReplicaUnavailableError, match=r"RAY_ADDRESS=10\.0\.0\.1:2 for http://h:2"):
        connect(environment={})
    environment = {"RAY_ADDRESS": "10.0.0.1:2"}
    connect(environment=environment)
    assert joined == ["10.0.0.1:2"]
    assert environment["RAY_AUTH_TOKEN_PATH"] == "/token", "that server's own"
    assert ray_constants.ENABLE_RAY_CLUSTER
    environment = {"RAY_ADDRESS": "10.0.0.3:2"}
    connect(environment=environment)
    assert joined[1:] == ["10.0.0.3:2"]
    assert "RAY_AUTH_TOKEN_PATH" not in environment, "no server of this user"


@pytest.mark.parametrize("named", [2, "2", "http://127.0.0.1:2", "http://localhost:2/"])
def test_a_program_names_the_server_that_it_joins(
    named: str | int, joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [server("http://127.0.0.1:1", "10.0.0.1:1"), server("http://127.0.0.1:2", "10.0.0.1:2")]
    monkeypatch.setattr(module, "own_servers", lambda _: found)
    connect(named, environment={"RAY_ADDRESS": "10.0.0.1:1"})
    assert joined == ["10.0.0.1:2"]
    with pytest.raises(ReplicaUnavailableError, match=r"No server 3 .* but: http://127\.0\.0\.1:1"):
        connect(3, environment={})


JOINS = """
import ray
from raystream import applications
from ray._raylet import AuthenticationMode, get_authentication_mode
from tests.raystream.test_applications import server

def init(**_):
    assert get_authentication_mode() == AuthenticationMode.TOKEN

ray.init = init
applications.own_servers = lambda _: [server("http://127.0.0.1:1", "10.0.0.1:1")]
assert get_authentication_mode() != AuthenticationMode.TOKEN
applications.connect()
"""


def test_ray_heeds_the_token_although_it_was_imported_before() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    subprocess.run([sys.executable, "-c", JOINS], env=plain, check=True)


def test_help_shows_no_variable_of_the_environment() -> None:
    assert "environ(" not in str(inspect.signature(connect))


def test_of_two_threads_one_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[str] = []
    is_joining = threading.Barrier(2)

    def init(address: str, **_: object) -> None:
        with suppress(threading.BrokenBarrierError):
            is_joining.wait(0.2)  # until the other joins, too, if it does
        joined.append(address)

    monkeypatch.setattr(ray, "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(module, "own_servers", lambda _: [])
    threads = [threading.Thread(target=connect, kwargs={"environment": {}}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert joined == ["auto"]
