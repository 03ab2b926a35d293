import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.commands.check import preflight
from serve_app.commands.check.compose import BUILDER
from serve_app.commands.check.preflight import (
    Depth,
    asked_by,
    check_file,
    room_faults,
    this_machine,
)
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports, is_free
from serve_app.config import AppConfig
from serve_app.placement import Node
from tests.failing import failing

ROOT = Path(__file__).resolve().parents[4]


class Run:
    """Checks the shipped file with another port and other keys."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._file = folder / "serve_config.yaml"
        self._capsys = capsys

    def __call__(self, port: int, **top: object) -> bool:
        document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        document["http_options"]["port"] = port
        self._file.write_text(yaml.safe_dump({**document, **top}))
        return check_file(str(self._file), Depth.START)

    def error(self, port: int, **top: object) -> str:
        """Return the one line by which a file is refused."""
        assert not self(port, **top)
        error = self._capsys.readouterr().err
        assert error.count("\n") == 1
        return error


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(tmp_path, capsys)


@pytest.fixture
def taken() -> socket.socket:
    """Return a socket that listens on a port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def test_a_used_port_is_reported_in_one_line(run: Run, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    with taken:
        assert f"{port} is in use on 127.0.0.1" in run.error(port)
    assert is_free("127.0.0.1", port)


def test_ports_that_are_set_for_haproxy_s_mode_must_be_free_too(
    run: Run, taken: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, *ports = free_ports(1 + len(HAPROXY_PORTS))
    for variable, port in zip(HAPROXY_PORTS, ports, strict=True):
        monkeypatch.setenv(variable, str(port))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(taken.getsockname()[1]))
    with taken:
        assert run(ours)
        monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
        assert run.error(ours).startswith("RAY_SERVE_HAPROXY_STATS_PORT: ")
    assert run(ours)


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "no-such-host.invalid"])
def test_a_host_of_another_machine_is_reported_in_one_line(run: Run, host: str) -> None:
    (port,) = free_ports(1)
    args = {
        "models": [{"id": "m", "source": "models/pydoc-chat"}],
        "auth": {"allow_anonymous": True},
    }
    applications = [{"import_path": BUILDER, "args": args}]
    error = run.error(port, http_options={"host": host, "port": port}, applications=applications)
    assert f"http_options.host: {host!r} is no address of this machine, which has " in error
    assert "127.0.0.1" in error


def test_a_port_of_the_administrator_is_reported_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "is_free", failing(PermissionError()))
    assert "http_options.port: the system lets only its administrator listen on 80" in run.error(80)


def test_haproxy_s_other_ports_differ_from_the_server_s(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in HAPROXY_PORTS:
        monkeypatch.delenv(variable, raising=False)
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", str(port))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert run.error(port).startswith("RAY_SERVE_HAPROXY_STATS_PORT: ")


@pytest.mark.parametrize("value", ["stats", "", "-1", "0", "65536", "8404.0", "²"])
def test_a_variable_that_is_no_port_is_reported_in_one_line(
    run: Run, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in HAPROXY_PORTS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STATS_PORT", value)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    (port,) = free_ports(1)
    assert run.error(port).startswith(f"RAY_SERVE_HAPROXY_STATS_PORT: {value!r} is not a port")


def test_https_is_refused_in_haproxy_s_mode_and_without_its_files(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    http = {"host": "127.0.0.1", "port": port}
    http |= {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    key.touch()
    assert f"http_options.ssl_certfile: '{certificate}' is no file" in run.error(
        port, http_options=http
    )
    certificate.touch()
    assert run(port, http_options=http), capsys.readouterr().err
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert "http_options.ssl_certfile: HAProxy's mode has no HTTPS" in run.error(
        port, http_options=http
    )


def test_a_wrong_file_is_refused_before_anything_else(run: Run) -> None:
    assert "proxy_lokation" in run.error(1, proxy_lokation="EveryNode")


def test_in_a_check_the_server_that_the_file_is_for_may_have_the_port(
    run: Run, taken: socket.socket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = taken.getsockname()[1]
    with taken:
        assert not run(port)
        assert f"{port} is in use" in (error := capsys.readouterr().err)
        assert "--port" in error
        assert check_file(str(tmp_path / "serve_config.yaml"))
    assert f": note: http_options.port: {port} is in use" in (error := capsys.readouterr().err)
    assert "--port" not in error


EVERYTHING = """\
http_options:
  host: 127.0.0.1
  port: {port}
applications:
  - import_path: serve_app.app:build
    args:
      models:
        - id: missing
          source: ./modles/chat
        - id: unknown
          source: a/b/c
          max_model_lenn: 5
        - id: encoder
          source: encoder
        - id: gpu
          source: models/pydoc-chat
          max_model_len: 100000
          num_gpus: 1
      auth:
        api_keys_file: nosuch.yaml
"""


def test_every_fault_is_told_in_one_go_with_its_line(
    tmp_path: Path,
    taken: socket.socket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "this_machine", lambda: Node(8))
    shutil.copytree(ROOT / "models/pydoc-search", tmp_path / "encoder")
    config = json.loads((tmp_path / "encoder/config.json").read_text())
    config |= {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta"}
    (tmp_path / "encoder/config.json").write_text(json.dumps(config))
    (tmp_path / "encoder/modules.json").unlink()
    file = tmp_path / "f.yaml"
    text = EVERYTHING.format(port=taken.getsockname()[1])
    file.write_text(text)
    with taken:
        assert not check_file(str(file), Depth.START)
    told = capsys.readouterr().err.splitlines()
    lines = {int(each.split(":")[1]): each for each in told}
    assert len(lines) == len(told) == 6, told
    assert "is in use" in lines[3]
    assert "there is no folder './modles/chat'" in lines[9]
    assert "can't be the id of a repository on the hub" in lines[11]
    assert "did you mean 'max_model_len'?" in lines[12]
    assert "is a RobertaForMaskedLM by its config.json, which does not generate" in lines[13]
    assert "100000 is more than the 2048 positions" in lines[17]
    # What depends on all entries is told once they are right.
    file.write_text(text.replace("          max_model_lenn: 5\n", ""))
    check_file(str(file))
    told = capsys.readouterr().err.splitlines()
    assert any("f.yaml:19: applications[0].args.auth.api_keys_file: " in each for each in told)
    assert any("num_gpus: a replica asks for 1 of a GPU, and this" in each for each in told)


def application(*models: dict[str, object]) -> AppConfig:
    entries = [{"id": f"m{i}", "source": "x", **model} for i, model in enumerate(models)]
    return AppConfig.model_validate({"models": entries})


ONE: dict[str, object] = {"num_cpus": 1}


@pytest.mark.parametrize(
    ("models", "sections", "machine", "message"),
    [
        ([{}] * 4, [], Node(2), None),
        (
            [ONE] * 4,
            [],
            Node(2),
            "args.models: the replicas ask for 4.2 cores together (Ingress 0.2, m0 1, m1 1, m2 1, "
            "m3 1), and this machine has 2: lower num_cpus, or write `num_cpus: auto`",
        ),
        ([ONE], [{"name": "m0", "num_replicas": 2}], Node(2), "(Ingress 0.2, m0 1 x 2)"),
        ([ONE], [{"name": "m0", "autoscaling_config": {"max_replicas": 9}}], Node(2), None),
        ([{"num_cpus": 3}], [], Node(2), "models[0].num_cpus: a replica asks for 3 cores"),
        ([{"num_gpus": 0.5}], [], Node(2), "models[0].num_gpus: a replica asks for 0.5 of a GPU"),
        ([{"num_gpus": 0.5}] * 2, [], Node(2, 1), None),
        ([{"num_gpus": 0.6}] * 2, [], Node(2, 1), "ask for 1.2 GPUs together (m0 0.6, m1 0.6)"),
        ([{"num_gpus": 0.6}] * 3, [], Node(2, 2), "find no place beside each other on the 2 GPUs"),
        # By itself a model has a whole GPU, and so has its second replica.
        ([{}], [{"name": "m0", "num_replicas": 2}], Node(2, 1), "2 GPUs together (m0 1 x 2)"),
        (
            [{}],
            [{"name": "m0", "ray_actor_options": {"num_cpus": 8, "num_gpus": 0}}],
            Node(2),
            "deployments[0].ray_actor_options.num_cpus: a replica asks for 8 cores",
        ),
    ],
)
def test_replicas_for_which_there_is_no_room_are_told_before_they_wait_for_it(
    models: list[dict[str, object]],
    sections: list[dict[str, object]],
    machine: Node,
    message: str | None,
) -> None:
    asked = asked_by(application(*models), sections, machine, "applications[0]")
    found = list(room_faults([asked], machine))
    if message is None:
        assert found == []
    else:
        (problem,) = found
        assert message in problem


@pytest.mark.parametrize(("num_cpus", "is_told"), [("auto", False), (0.8, False), (1.5, True)])
def test_models_of_a_light_group_need_room_beside_each_other(
    num_cpus: float | str, is_told: bool
) -> None:
    models = application({"num_cpus": num_cpus}, {"num_cpus": num_cpus})
    sections = [{"name": f"m{i}", "autoscaling_config": {"min_replicas": 0}} for i in (0, 1)]
    asleep = asked_by(models, sections, Node(2), "applications[0]")
    assert list(room_faults([asleep], Node(2))) == []
    light = asked_by(models, sections, Node(2), "applications[0]", light_groups=[("m0", "m1")])
    found = list(room_faults([light], Node(2)))
    assert ["ask for 3.2 cores together" in each for each in found] == [True] * is_told


SEVERAL = """
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: a
    route_prefix: /a
    import_path: serve_app.app:build
    args: {{models: [{{id: chat, source: models/pydoc-chat, num_cpus: {num_cpus}}}]}}
  - name: b
    route_prefix: /b
    import_path: serve_app.app:build
    args: {{models: [{{id: chat, source: models/pydoc-chat, num_cpus: 1.5}}]}}
  - name: c
    route_prefix: /c
    import_path: explain:app
    deployments:
      - {{name: Unknown, num_replicas: 9}}
      - {{name: Explain, ray_actor_options: {{num_cpus: {foreign}}}}}
"""


@pytest.mark.parametrize(
    ("num_cpus", "foreign", "told"),
    [
        ("auto", 0, None),  # of which the builder takes what is left
        (
            0.5,
            0,
            "f.yaml:3: applications: the replicas ask for 2.4 cores together (a/Ingress 0.2, "
            "a/chat 0.5, b/Ingress 0.2, b/chat 1.5), and this machine has 2",
        ),
        ("auto", 0.5, "c/Explain 0.5), and this machine has 2"),
        (
            "auto",
            8,
            "f.yaml:17: applications[2].deployments[1].ray_actor_options.num_cpus: a replica asks "
            "for 8 cores, and this machine has 2; lower it",
        ),
    ],
)
def test_all_applications_of_a_file_share_the_machine(
    num_cpus: object,
    foreign: float,
    told: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "this_machine", lambda: Node(2))
    (port,) = free_ports(1)
    file = tmp_path / "f.yaml"
    file.write_text(SEVERAL.format(port=port, num_cpus=num_cpus, foreign=foreign))
    assert check_file(str(file)) is (told is None)
    error = capsys.readouterr().err
    assert told is None or told in error


def test_this_machine_has_the_cores_that_ray_would_find() -> None:
    assert this_machine().num_cpus >= 1


def vllm_file(folder: Path, **keys: Any) -> Path:
    """Write a file with one model that vLLM runs."""
    model = {"id": "m", "source": str(ROOT / "models/pydoc-chat"), "engine": "vllm", **keys}
    application = {"import_path": BUILDER, "args": {"models": [model]}}
    http = {"host": "127.0.0.1", "port": free_ports(1)[0]}
    file = folder / "f.yaml"
    file.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    return file


def test_servers_that_run_already_need_no_environment_of_vllm(tmp_path: Path) -> None:
    assert check_file(str(vllm_file(tmp_path, engine_urls=["http://127.0.0.1:9"])))


def test_a_missing_environment_of_vllm_is_told_with_the_command_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = vllm_file(tmp_path, engine_python="envs/v")
    assert not check_file(str(file))
    told = capsys.readouterr().err
    assert f"raystream install-engine vllm --to {tmp_path / 'envs/v'}" in told
    assert told.count("\n") == 1
    assert check_file(str(file), Depth.FILE)
