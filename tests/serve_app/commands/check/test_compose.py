import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.commands.check import model_source
from serve_app.commands.check.check import find_problems
from serve_app.commands.check.compose import (
    BUILDER,
    ServeOptions,
    compose,
    configuration,
    in_words,
    is_file,
)
from serve_app.commands.check.preflight import Depth, examine
from serve_app.commands.check.source_files import ModelFiles, SourceError
from serve_app.config import AppConfig
from serve_app.keys.api_keys import load_api_keys

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = ROOT / "models"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder, with a home in it."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def copy(name: str, to: Path) -> Path:
    return Path(shutil.copytree(SHIPPED / name, to))


def entries(*names: str, **options: Any) -> list[dict[str, Any]]:
    (application,) = compose(ServeOptions(names, **options))["applications"]
    found: list[dict[str, Any]] = application["args"]["models"]
    return found


def ids(*names: str) -> list[str]:
    return [entry["id"] for entry in entries(*names)]


def test_a_folder_is_served_under_its_name_and_by_its_files(here: Path) -> None:
    copy("pydoc-detector", here / "my model")
    for name in ("my model", "my model/", "./my model", str(here / "my model")):
        (entry,) = entries(name)
        assert entry == {
            "id": "my-model",
            "source": str(here / "my model"),
            "task": "classify",
            "num_gpus": "auto",
            "num_cpus": "auto",
            "max_model_len": "auto",
        }
    copy("pydoc-search", here.parent / "home/search")
    assert entries("~/search")[0]["task"] == "embed"


def test_the_folder_of_the_shell_has_a_name_too(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy("pydoc-chat", here / "chat"))
    assert ids(".") == ["chat"]


def test_folders_of_the_same_name_are_told_apart_by_those_above(here: Path) -> None:
    for name in ("a/model", "b/model", "other"):
        copy("pydoc-search", here / name)
    assert ids("a/model", "b/model", "other") == ["a/model", "b/model", "other"]


def test_an_embedded_model_is_served_from_any_folder(here: Path) -> None:
    (entry,) = entries("models/pydoc-chat")
    assert (entry["id"], entry["source"]) == ("pydoc-chat", "models/pydoc-chat")


COMMIT = "b" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Let the hub have every repository, and return what it was asked for."""
    asked: list[tuple[str, str | None]] = []

    def ask(source: str, revision: str | None) -> ModelFiles:
        asked.append((source, revision))
        config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        return ModelFiles(source, frozenset({"config.json"}), None, COMMIT, config)

    monkeypatch.setattr(model_source, "_ask_hub", ask)
    return asked


def test_a_repository_is_served_under_its_id_at_the_commit_that_was_found(
    here: Path, hub: list[tuple[str, str | None]]
) -> None:
    (entry,) = entries("some-owner/Model.7B")
    assert entry["id"] == entry["source"] == "some-owner/Model.7B"
    assert (entry["revision"], entry["task"]) == (COMMIT, "generate")
    (entry,) = entries("some-owner/Model.7B@v2")
    assert entry["source"] == "some-owner/Model.7B"
    assert hub == [("some-owner/Model.7B", None), ("some-owner/Model.7B", "v2")]


def test_a_folder_stands_before_a_repository_of_the_same_name(
    here: Path, hub: list[tuple[str, str | None]]
) -> None:
    copy("pydoc-chat", here / "some-owner/model")
    assert entries("some-owner/model")[0]["source"] == str(here / "some-owner/model")
    assert hub == []
    # A file beside the folder could not name the repository.
    options = ServeOptions(("some-owner/model@main",))
    assert "is a folder here, which has no revision" in (options.misuse() or "")


def test_a_folder_of_the_hub_s_cache_has_the_repository_s_id(here: Path) -> None:
    copy("pydoc-chat", here / f"models--some--model/snapshots/{COMMIT}")
    assert ids(f"models--some--model/snapshots/{COMMIT}") == ["some/model"]


def test_options_are_keys_of_the_file(here: Path) -> None:
    options = ServeOptions(
        ("models/pydoc-chat",),
        host="0.0.0.0",
        port=8001,
        task="embed",
        num_replicas=2,
        num_gpus="0.5",
        num_cpus="2",
        max_model_len="512",
        api_key_sha256=sha256(b"secret").hexdigest(),
    )
    document = compose(options)
    assert document["http_options"] == {"host": "0.0.0.0", "port": 8001}
    (application,) = document["applications"]
    (entry,) = application["args"]["models"]
    assert (entry["task"], entry["num_gpus"]) == ("embed", 0.5)
    assert (entry["num_cpus"], entry["max_model_len"]) == (2, 512)
    assert application["args"]["auth"]["api_keys"][0]["sha256"] == options.api_key_sha256
    assert application["deployments"][1]["num_replicas"] == 2
    assert ServeOptions.parse(options.arguments()) == options


def test_a_saved_file_serves_with_the_keys_of_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "secret-key-number-1"
    pairs = {"a": sha256(b"1").hexdigest(), "b": sha256(b"2").hexdigest()}
    for given, keys in (
        (secret, {"default": sha256(secret.encode()).hexdigest()}),
        (", ".join(f"{name}:{sha}" for name, sha in pairs.items()), pairs),
    ):
        monkeypatch.setenv("RAYSTREAM_API_KEYS", given)
        found = configuration(ServeOptions(("models/pydoc-chat",), save="my.yaml"))
        assert secret not in found.text
        # In the same shell, too, where the variable adds what the file has already.
        assert find_faults_of_keys(found.text) == []
        monkeypatch.delenv("RAYSTREAM_API_KEYS")
        args = yaml.safe_load(found.text)["applications"][0]["args"]
        ring = load_api_keys(AppConfig.model_validate(args).auth, here, {})
        assert {key.name: key.sha256 for key in (ring.keys if ring else ())} == keys
    monkeypatch.setenv("RAYSTREAM_API_KEYS", "too-short")
    found = configuration(ServeOptions(("models/pydoc-chat",), save="my.yaml"))
    (fault,) = find_faults_of_keys(found.text)
    assert in_words(fault).startswith("RAYSTREAM_API_KEYS: write name:sha256 pairs")


def find_faults_of_keys(text: str) -> list[str]:
    return [each for each in examine(text, Depth.MACHINE).faults if "KEYS" in each or "key" in each]


def test_a_composed_configuration_is_a_file_without_faults(here: Path) -> None:
    for name in ("pydoc-chat", "pydoc-detector", "pydoc-search"):
        found = configuration(ServeOptions((f"models/{name}",)))
        assert find_problems(found.text) == []


def test_its_deployments_are_those_of_the_shipped_file(here: Path) -> None:
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]
    (ours,) = compose(ServeOptions(("models/pydoc-chat",)))["applications"]
    for section, other in zip(ours["deployments"], shipped["deployments"], strict=False):
        for key in section.keys() - {"num_replicas"}:
            assert section[key] == other[key], key


def test_a_file_keeps_all_but_what_the_options_replace(here: Path) -> None:
    file = here / "mine.yaml"
    shutil.copy(ROOT / "serve_config.yaml", file)
    sha = sha256(b"secret").hexdigest()
    found = configuration(ServeOptions((str(file),), port=9000, api_key_sha256=sha))
    before, after = yaml.safe_load(file.read_text()), yaml.safe_load(found.text)
    assert after["http_options"] == {"host": "127.0.0.1", "port": 9000}
    auth = after["applications"][0]["args"].pop("auth")
    assert auth["api_keys"] == [{"name": "default", "sha256": sha, "scopes": ["operate"]}]
    del before["applications"][0]["args"]["auth"]
    assert after["applications"] == before["applications"]
    assert configuration(ServeOptions((str(file),))).text == file.read_text()


def test_a_key_is_written_only_into_applications_of_raystream(here: Path) -> None:
    sha = sha256(b"secret").hexdigest()
    ours = {"import_path": BUILDER, "args": {"models": []}}
    foreign = {"import_path": "explain:app", "args": {"a": 1}}
    file = here / "mine.yaml"
    file.write_text(yaml.safe_dump({"applications": [ours, foreign, "x"]}))
    found = configuration(ServeOptions((str(file),), api_key_sha256=sha))
    first, *others = yaml.safe_load(found.text)["applications"]
    assert first["args"]["auth"]["api_keys"][0]["sha256"] == sha
    assert others == [foreign, "x"]
    file.write_text("applications: 5\n")  # the check says what is wrong with it
    found = configuration(ServeOptions((str(file),), api_key_sha256=sha))
    assert yaml.safe_load(found.text) == {"applications": 5}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("serve_config.yaml", True),
        ("nosuch.yml", True),
        ("text", True),
        ("folder.yaml", False),
        ("model.gguf", False),
        ("config.json", False),
        ("owner/model", False),
        ("nosuch", False),
    ],
)
def test_a_name_is_a_file_or_a_model(here: Path, name: str, expected: bool) -> None:
    (here / "folder.yaml").mkdir()
    for file in ("text", "model.gguf", "config.json"):
        (here / file).touch()
    assert is_file(name) is expected


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        ("http_options.port: 8000 is in use", "--port: 8000 is in use"),
        ("http_options.host: no address", "--host: no address"),
        (
            "applications[0].args.models[1].task: 'x' can't; write `task: embed`",
            "--task: 'x' can't; write `--task embed`",
        ),
        (
            "applications[0].args.models: too many; write `num_cpus: auto`",
            "too many; write `--num-cpus auto`",
        ),
        ("applications[0].args.models[0].source: there is no", "there is no"),
        ("applications[0].args.auth: no keys", "no keys; or give --api-key"),
        ("applications[0].args.auth: API keys: twice", "API keys: twice"),
        ("RAYSTREAM_API_KEYS: write pairs", "RAYSTREAM_API_KEYS: write pairs"),
        ("RAY_SERVE_X: no port", "RAY_SERVE_X: no port"),
    ],
)
def test_a_fault_is_told_in_the_words_of_the_command_line(problem: str, told: str) -> None:
    assert in_words(problem) == told


def test_of_several_models_each_may_do_something_else() -> None:
    problem = "applications[0].args.models[1].task: 'x' does not generate; write `task: embed`"
    assert in_words(problem, 2) == (
        "--task: 'x' does not generate; leave --task out: each model then does what its files say"
    )
    problem = "applications[0].args.models[1].task: 'x' does not generate; take another model"
    assert in_words(problem, 2) == "--task: 'x' does not generate; take another model"


def test_names_in_the_saved_file_s_first_line_do_not_end_it(here: Path) -> None:
    text = configuration(ServeOptions(("models/pydoc-chat\n- x", "models/pydoc-chat"))).text
    assert re.fullmatch(
        r"# Written by raystream serve models/pydoc-chat - x .*", text.splitlines()[0]
    )


@pytest.mark.parametrize(
    "name", ["~nosuchuser/x", "~nosuchuser/x@main", "x" * 300, "./" + "x" * 300]
)
def test_a_path_that_the_system_refuses_is_a_model_whose_fault_the_check_tells(
    here: Path, name: str
) -> None:
    options = ServeOptions((name,))
    assert (is_file(name), options.misuse()) == (False, None)
    found = configuration(options)
    faults = examine(found.text, Depth.MACHINE, found.known).faults
    (fault,) = (each for each in faults if ".source: " in each)
    assert "is no home here" in fault or "File name too long" in fault


def test_a_file_in_an_unknown_user_s_home_can_t_be_read(here: Path) -> None:
    with pytest.raises(OSError, match="~nosuchuser is no home here"):
        configuration(ServeOptions(("~nosuchuser/x.yaml",)))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_hub_is_asked_once_for_a_start(
    here: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(source: str, revision: str | None) -> ModelFiles:
        asked.append(source)
        if not is_there:
            raise SourceError("the hub is silent")
        return ModelFiles(source, frozenset({"config.json"}), None, COMMIT, {"model_type": "qwen2"})

    monkeypatch.setattr(model_source, "_ask_hub", ask)
    found = configuration(ServeOptions(("some/model", "other/model")))
    faults = examine(found.text, Depth.MACHINE, found.known).faults
    assert sorted(asked) == ["other/model", "some/model"]
    assert any("the hub is silent" in each for each in faults) is not is_there


def test_models_of_vllm_get_time_for_a_health_check(here: Path) -> None:
    copy("pydoc-chat", here / "m")
    found = compose(ServeOptions(("m",), engine="vllm"))
    application = found["applications"][0]
    assert application["args"]["models"][0]["engine"] == "vllm"
    assert "limits" not in application["args"]  # a lost stream waits by the start it has heard of
    assert application["deployments"][1]["health_check_timeout_s"] == 10
    assert find_problems(yaml.safe_dump(found)) == []


def test_an_unknown_engine_is_told_of_its_option(here: Path) -> None:
    copy("pydoc-chat", here / "m")
    (problem,) = find_problems(yaml.safe_dump(compose(ServeOptions(("m",), engine="vlm"))))
    assert in_words(problem).startswith("--engine: ")
