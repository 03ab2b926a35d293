"""The command line `raystream`; `tests/ray` serves the shipped file by it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from errno import EAGAIN, ENOSPC
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from raystream.__main__ import app
from serve_app.commands.check.compose import ServeOptions
from serve_app.commands.run import supervise
from tests.failing import failing
from tests.offenders import for_each

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = [
    "serve", "new-config", "status", "deploy", "stop", "schema", "chat", "batch", "demo", "check",
    "plan", "download", "install-engine", "new-key", "info", "supervise", "bench",
]  # fmt: skip
SHIPPED = str(ROOT / "serve_config.yaml")


DRIVER = (sys.executable, "-m", "serve_app.commands.run.driver")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Restore what `serve` sets for its server."""
    before = os.umask(0o077)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the commands that are run under the supervisor, instead of running them."""
    commands: list[list[str]] = []

    def run_supervised(command: Sequence[str], environment: Mapping[str, str]) -> int:
        commands.append(list(command))
        # `serve` adds Serve's switches of serve.env; `supervise` adds none.
        is_serve = command[0] == sys.executable
        assert ("RAY_SERVE_HAPROXY_TUNE_BUFSIZE" in environment) == is_serve
        return 3

    monkeypatch.setattr(supervise, "run_supervised", run_supervised)
    return commands


def test_the_driver_runs_under_the_supervisor(supervised: list[list[str]]) -> None:
    assert CliRunner().invoke(app, ["serve", "file.yaml"]).exit_code == 3
    assert supervised == [[*DRIVER, "--", "file.yaml"]]


def test_models_and_options_reach_the_driver_and_of_a_key_only_its_hash(
    supervised: list[list[str]],
) -> None:
    options = ["--port", "8001", "--num-cpus", "auto", "--api-key", "sk-mine-12345678"]
    assert CliRunner().invoke(app, ["serve", "Qwen/Qwen3-0.6B", ".", *options]).exit_code == 3
    (command,) = supervised
    assert "sk-mine-12345678" not in " ".join(command)
    assert ServeOptions.parse(command[len(DRIVER) :]) == ServeOptions(
        ("Qwen/Qwen3-0.6B", "."),
        port=8001,
        num_cpus="auto",
        api_key_sha256=sha256(b"sk-mine-12345678").hexdigest(),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.yaml", "b/c"], "give either one FILE or models; a.yaml is a file"),
        (["a.yaml", "--task", "embed", "--save", "b.yaml"], "a.yaml has --task, --save itself"),
        (["b/c", "--api-key", "short"], "it must be 16 to 256 letters, digits and signs"),
        (["b/c", "--port", "0"], "greater than or equal to 1"),
    ],
)
def test_options_that_can_not_be_combined_are_refused(
    supervised: list[list[str]], arguments: list[str], message: str
) -> None:
    refused = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
    assert (refused.exit_code, message in refused.stderr) == (2, True), refused.stderr
    assert supervised == []


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"raystream {version('raystream')}\n"


@pytest.mark.parametrize("command", [["serve", "file.yaml"], ["supervise", "serve"]])
def test_a_machine_without_a_folder_for_a_server_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("serve_app.commands.server_environment.FOLDER_PARENT", "/dev/null")
    monkeypatch.setenv("TMPDIR", "/dev/null")
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    assert told.stderr.startswith("Error: /dev/null can't be written: ")
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["serve", "file.yaml"], ["supervise", "serve"]])
def test_a_full_folder_is_told_in_one_line_that_does_not_blame_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    own = tmp_path / "raystream-a1b2c3d4"
    own.mkdir()
    monkeypatch.setattr(supervise, "make_own_folder", lambda environment: own)
    monkeypatch.setattr(supervise, "hold_record", failing(OSError(ENOSPC, os.strerror(ENOSPC))))
    told = CliRunner().invoke(app, command)
    line = f"Error: {tmp_path} can't be written: No space left on device\n"
    assert (told.exit_code, told.stderr) == (1, line)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_can_t_be_started_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "run_supervised", failing(OSError(EAGAIN, os.strerror(EAGAIN))))
    told = CliRunner().invoke(app, ["serve", "file.yaml"])
    line = f"Error: {sys.executable}: Resource temporarily unavailable\n"
    assert (told.exit_code, told.stderr) == (1, line)


def test_without_a_file_the_folder_s_own_is_served_or_else_the_embedded_models(
    supervised: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["serve"]).stdout
    assert told.startswith(
        "There is no serve_config.yaml here, so the embedded models are served.\n"
    )
    (tmp_path / "serve_config.yaml").touch()
    assert CliRunner().invoke(app, ["serve"]).stdout == ""
    assert supervised == [[*DRIVER, "--", SHIPPED], [*DRIVER, "--", "serve_config.yaml"]]


def test_the_shipped_configuration_is_written_to_be_changed_and_never_over_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new-config"]).exit_code == 0
    line, _, rest = Path("serve_config.yaml").read_text().partition("\n")
    assert line == "# yaml-language-server: $schema=raystream.schema.json"
    assert rest == Path(SHIPPED).read_text()
    printed = CliRunner().invoke(app, ["schema"]).stdout
    schema = Path("raystream.schema.json")
    assert schema.read_text() == printed
    for before in (printed, printed.replace("object", "older")):
        schema.write_text(before)
        assert CliRunner().invoke(app, ["new-config", "b.yaml"]).exit_code == 0
        assert schema.read_text() == printed
        Path("b.yaml").unlink()
    schema.write_text("{}")
    refused = CliRunner().invoke(app, ["new-config", "b.yaml"])
    assert (refused.exit_code, refused.stderr) == (1, "Error: raystream.schema.json: File exists\n")
    assert (schema.read_text(), Path("b.yaml").exists()) == ("{}", False)
    Path("serve_config.yaml").write_text("mine")
    refused = CliRunner().invoke(app, ["new-config"])
    assert (refused.exit_code, refused.stderr) == (1, "Error: serve_config.yaml: File exists\n")
    assert Path("serve_config.yaml").read_text() == "mine"


def test_any_command_runs_under_the_supervisor_as_it_is_written(
    supervised: list[list[str]],
) -> None:
    command = ["serve", "run", "--address", "local", "--help", "f.yaml"]
    assert CliRunner().invoke(app, ["supervise", *command]).exit_code == 3
    assert supervised == [command]


@pytest.mark.parametrize("name", ["deployments/__init__.py", "serve_app.py"])
def test_a_folder_with_a_module_that_ray_would_take_for_ours_is_refused(
    supervised: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deployments").mkdir()  # without __init__.py it hides nothing
    command = ["supervise", "serve", "run", "f.yaml"]
    assert CliRunner().invoke(app, command).exit_code == 3
    (tmp_path / name).touch()
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"Error: {tmp_path / name} hides raystream's own: rename it")
    assert len(supervised) == 1


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [("nosuch", 127, "No such file or directory"), ("/dev", 126, "Permission denied")],
)
def test_a_program_that_can_t_be_run_is_named_in_one_line(
    program: str, code: int, why: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "raystream", "supervise", program, "--flag"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (code, f"Error: {program}: {why}\n")


def test_a_file_is_checked() -> None:
    found = CliRunner().invoke(app, ["check", SHIPPED, "--file-only"])
    assert (found.exit_code, found.stdout.count("\n")) == (0, 1)
    assert CliRunner().invoke(app, ["check", "nowhere.yaml"]).exit_code == 1


def test_a_key_is_made_or_its_name_refused() -> None:
    made = CliRunner().invoke(app, ["new-key", "alice"])
    assert (made.exit_code, "sk-raystream-" in made.stdout) == (0, True)
    operator = CliRunner().invoke(app, ["new-key", "alice", "--scope", "operate"])
    assert "\n    scopes: [operate]\n" in operator.stdout
    unknown = CliRunner().invoke(app, ["new-key", "alice", "--scope", "all"])
    assert (unknown.exit_code, "no scope 'all'" in unknown.stderr) == (2, True)
    refused = CliRunner().invoke(app, ["new-key", "a b"])
    assert refused.exit_code == 2
    assert "1 to 64 letters" in " ".join(refused.stderr.replace("│", " ").split())


def test_the_machine_is_described() -> None:
    told = CliRunner().invoke(app, ["info"]).stdout
    names = [line[:14].rstrip() for line in told.splitlines()]
    assert names[:9] == [
        "python",
        "raystream",
        "ray",
        "torch",
        "transformers",
        "starlette",
        "pydantic",
        "vllm",
        "system",
    ]
    assert {"cpu", "memory"} < set(names)


@pytest.mark.parametrize(
    "arguments", [["serve", "a.yaml", "b.yaml"], ["check"], ["new-key"], ["new-key", "a", "b"]]
)
def test_wrong_usage_starts_nothing(arguments: list[str], supervised: list[list[str]]) -> None:
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 2
    assert "Usage: raystream" in ended.stderr
    assert supervised == []


@for_each(*COMMANDS)
def test_each_command_explains_itself(name: str, supervised: list[list[str]]) -> None:
    told = CliRunner().invoke(app, [name, "--help"])
    assert (told.exit_code, supervised) == (0, [])
    assert f"Usage: raystream {name}" in told.stdout
    assert name in CliRunner().invoke(app, ["--help"]).stdout


def test_no_command_is_forgotten() -> None:
    assert list(get_group(app).commands) == COMMANDS


def test_bash_completes_commands_and_options_by_the_script_that_it_is_given() -> None:
    raystream = Path(sys.executable).parent / "raystream"
    lines = [f'eval "$({raystream} --show-completion bash)"', "complete -p raystream"]
    for words in ("pl", "plan --gpu-m"):
        num_words = len(words.split())
        lines.append(f"COMP_WORDS=(raystream {words}); COMP_CWORD={num_words}")
        lines.append(f'_raystream_completion {raystream}; echo "${{COMPREPLY[*]}}"')
    run = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    registered, *completed = run.stdout.splitlines()
    assert registered.endswith("-F _raystream_completion raystream")
    assert completed == ["plan", "--gpu-memory"]


def test_a_supervisor_holds_neither_ray_nor_torch() -> None:
    code = (
        "import sys, serve_app.commands.cli, serve_app.commands.run.supervise;"
        "print({'ray', 'torch', 'starlette'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "set()\n"


@pytest.mark.parametrize("name", ["my-model", "owner/model"])
def test_a_model_in_place_of_a_file_to_plan_is_told_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    refused = CliRunner().invoke(app, ["plan", name], env={"COLUMNS": "200"})
    assert (refused.exit_code, f"write --model {name}" in refused.stderr) == (2, True)
