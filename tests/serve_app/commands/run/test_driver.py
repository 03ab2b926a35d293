import os
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import click
import pytest
import yaml
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ProxyStatus,
    ServeStatus,
)

from benchmarks.free_port import free_port
from deployments.contract.model_spec import ModelConfig
from serve_app.commands.check.compose import Configuration
from serve_app.commands.run import driver, server_record
from serve_app.commands.run.announcement import StartFailedError
from serve_app.commands.run.driver import describe, main, pending_deployments
from serve_app.commands.run.server_record import FOLDER, hold_record
from serve_app.gpu_shares import to_spec
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE

ROOT = Path(__file__).resolve().parents[4]


def shipped_config(folder: Path, route_prefix: str = "/", **http: object) -> str:
    """Write the shipped file with other options, and return its path."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"] |= http
    document["applications"][0]["route_prefix"] = route_prefix
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def status(
    application: ApplicationStatus, message: str = "", **deployments: DeploymentStatus
) -> ServeStatus:
    overviews = {
        name: DeploymentStatusOverview(state, DeploymentStatusTrigger.UNSPECIFIED, {}, "")
        for name, state in deployments.items()
    }
    overview = ApplicationStatusOverview(application, message, 0, overviews)
    return ServeStatus({"node": ProxyStatus.HEALTHY}, {"raystream": overview})


def test_what_is_announced_comes_from_the_file(tmp_path: Path) -> None:
    name, announced = describe(
        shipped_config(tmp_path, "/llm", port=8123), "127.0.0.1:8266", Path("/tmp/ray/session")
    )
    assert name == "raystream"
    assert announced.url == "http://127.0.0.1:8123/llm"
    models = ["pydoc-chat", "pydoc-detector", "pydoc-search"]
    assert [model.id for model in announced.models] == models
    assert not announced.needs_key
    assert announced.dashboard_url == "http://127.0.0.1:8266"
    assert announced.logs == "/tmp/ray/session/logs/serve"


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "ALL_PROXY"])
def test_the_request_that_is_announced_asks_no_proxy_of_the_environment(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("no_proxy", "localhost")
    assert not describe(shipped_config(tmp_path), None, tmp_path)[1].has_proxy
    monkeypatch.setenv(variable, "http://proxy.example:3128")
    assert describe(shipped_config(tmp_path), None, tmp_path)[1].has_proxy


def test_a_server_with_a_certificate_is_announced_by_https(tmp_path: Path) -> None:
    tls = {"ssl_keyfile": "key.pem", "ssl_certfile": "certificate.pem"}
    _, announced = describe(shipped_config(tmp_path, port=8123, **tls), None, tmp_path)
    assert announced.url == "https://127.0.0.1:8123"


def test_keys_are_announced_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, f"ann:{sha256(b'secret').hexdigest()}")
    _, announced = describe(shipped_config(tmp_path), None, tmp_path)
    assert announced.needs_key
    assert announced.dashboard_url is None


@pytest.mark.parametrize("proxies", [{}, {"node": ProxyStatus.UNHEALTHY}])
def test_a_server_whose_proxy_has_no_port_is_not_ready(proxies: dict[str, ProxyStatus]) -> None:
    running = replace(status(ApplicationStatus.RUNNING), proxies=proxies)
    assert pending_deployments(running, "raystream") == ["the proxy in front"]


def test_deployments_are_pending_until_the_application_runs() -> None:
    deploying = status(
        ApplicationStatus.DEPLOYING,
        chat=DeploymentStatus.UPDATING,
        Ingress=DeploymentStatus.HEALTHY,
    )
    running = status(ApplicationStatus.RUNNING, chat=DeploymentStatus.HEALTHY)
    assert pending_deployments(deploying, "raystream") == ["chat"]
    assert pending_deployments(running, "raystream") == []


def test_an_application_without_deployments_yet_is_itself_pending() -> None:
    deploying = status(ApplicationStatus.DEPLOYING)
    assert pending_deployments(deploying, "raystream") == ["raystream"]
    assert pending_deployments(ServeStatus(), "raystream") == ["raystream"]


def test_an_application_that_serve_gives_up_fails_the_start() -> None:
    failed = status(ApplicationStatus.DEPLOY_FAILED, "Failed to update the deployments ['chat'].")
    with pytest.raises(StartFailedError, match="deployments \\['chat'\\]"):
        pending_deployments(failed, "raystream")


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:raystream:chat.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
RuntimeError: Traceback (most recent call last):
  File "deployments/replica/model_replica.py", line 76, in __init__
    raise error.with_traceback(None) from None
{}
"""
DAMAGED = (
    "deployments.contract.unsupported_model.UnsupportedModelError: can't load 'x': its weights are "
    "damaged"
)
TOO_LARGE = (
    "deployments.plan.memory_budget.ModelTooLargeError: a share of 1 of 24.00 GiB leaves 21.60 "
    "GiB to use, but the model needs 23.11 GiB for weights; give it a device of 26.3 GiB"
)


def with_message(found: ServeStatus, message: str) -> ServeStatus:
    (deployment,) = found.applications["raystream"].deployments.values()
    object.__setattr__(deployment, "message", message)
    return found


def test_a_failed_start_tells_the_deployment_and_its_error_in_one_line() -> None:
    failed = status(ApplicationStatus.DEPLOY_FAILED, "...", chat=DeploymentStatus.DEPLOY_FAILED)
    message = TRACEBACK.format("ValueError: the model asks for a GPU; write `device: cpu`")
    with pytest.raises(StartFailedError) as caught:
        pending_deployments(with_message(failed, message), "raystream")
    assert str(caught.value) == "chat: the model asks for a GPU; write `device: cpu`"


@pytest.mark.parametrize("error", [DAMAGED, TOO_LARGE])
def test_a_model_that_can_t_be_served_fails_the_start_at_the_first_attempt(error: str) -> None:
    retrying = status(ApplicationStatus.DEPLOYING, chat=DeploymentStatus.UPDATING)
    with pytest.raises(StartFailedError) as caught:
        pending_deployments(with_message(retrying, TRACEBACK.format(error)), "raystream")
    assert str(caught.value) == f"chat: {error.partition(': ')[2]}"


def test_other_errors_may_pass_so_serve_tries_again() -> None:
    retrying = status(ApplicationStatus.DEPLOYING, chat=DeploymentStatus.UPDATING)
    message = TRACEBACK.format("DeviceMemoryError: too little memory is free")
    assert pending_deployments(with_message(retrying, message), "raystream") == ["chat"]


def test_an_interruption_that_serve_s_command_catches_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    @click.option("--non-blocking", is_flag=True)
    @click.option("--address")
    @click.option("--app-dir")
    @click.argument("name")
    def run(**given: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit()

    monkeypatch.setattr(driver, "run", run)
    with pytest.raises(KeyboardInterrupt):
        driver.deploy("serve_config.yaml", "127.0.0.1:6379")


def test_relative_paths_in_the_file_start_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/my-model").mkdir()
    found: list[str] = []

    def note(file: str, configuration: Configuration) -> int:
        assert Path(file).exists()
        assert configuration.file == path
        found.append(to_spec(ModelConfig(id="m", source="my-model"), 0).source)
        return 7

    monkeypatch.chdir(tmp_path)
    path = Path(shipped_config(tmp_path / "conf", port=free_port())).relative_to(tmp_path)
    monkeypatch.setattr(driver, "_serve", note)
    monkeypatch.setattr(sys, "argv", ["driver", "--", str(path)])
    assert main() == 7
    assert found == [str(tmp_path / "conf/my-model")]


def test_a_composed_file_lies_in_the_supervisor_s_folder_which_is_cleared_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def note(file: str, configuration: Configuration) -> int:
        document = yaml.safe_load(Path(file).read_text())
        assert document["http_options"]["port"] == port
        found.append(file)
        return 7

    port, own = free_port(), tmp_path / "raystream-a1b2c3d4"
    own.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server_record, "folder_parents", lambda environment: [str(tmp_path)])
    monkeypatch.setattr(os, "getppid", os.getpid)
    monkeypatch.setattr(driver, "_serve", note)
    arguments = [f"--port={port}", "--", shipped_config(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["driver", *arguments])
    with hold_record(own, ["driver"]):
        assert main() == 7
    assert main() == 7  # without a supervisor
    assert Path(found[0]).is_relative_to(own)
    assert not FOLDER.fullmatch(Path(found[1]).parent.name)
    assert not any(Path(each).exists() for each in found)


def test_a_file_that_is_not_there_is_told_in_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", "--", "nope.yaml"])
    assert main() == 1
    assert capsys.readouterr().err == "nope.yaml: No such file or directory\n"


def test_a_wrong_file_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the driver goes to the file's folder
    path = shipped_config(tmp_path, hots="127.0.0.1")
    monkeypatch.setattr(sys, "argv", ["driver", "--", path])
    assert main() == 1
    captured = capsys.readouterr()
    assert "hots" in captured.err
    assert "Starting Ray" not in captured.out
