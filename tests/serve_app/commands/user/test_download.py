import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.contract.model_spec import ModelConfig
from serve_app.commands.cli import app
from serve_app.commands.user.download import DownloadError, HubModel, download, hub_models, wait
from tests.hub_configs import config_file

SHA = "a" * 40
MODEL = HubModel("org/name", SHA)
ROOT = Path(__file__).parents[4]
GPU_OVERLAY = ROOT / "k8s" / "overlays" / "gpu-shared" / "serve_config.yaml"


class FakeHub:
    """A hub that writes files in place of a download."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[tuple[str, str]] = []

    def __call__(self, source: str, revision: str, cache: Path) -> Path:
        self.asked.append((source, revision))
        folder = cache / f"models--{source.replace('/', '--')}" / "snapshots" / revision
        folder.mkdir(parents=True)
        for name in self.names:
            (folder / name).touch()
        return folder


def entry(**changes: object) -> ModelConfig:
    values = {"id": "m", "source": "org/name", "task": "generate", "revision": SHA, **changes}
    return ModelConfig.model_validate(values)


def test_only_models_of_the_hub_are_downloaded() -> None:
    models = [entry(), entry(source="models/pydoc-chat", revision=None)]
    assert hub_models(models, ["f.yaml:4", "f.yaml:6"]) == [MODEL]


@pytest.mark.parametrize("revision", [None, "main", "a" * 39, "A" * 40])
def test_a_model_without_a_commit_is_refused(revision: str | None) -> None:
    with pytest.raises(DownloadError) as refused:
        hub_models([entry(revision=revision)], ["f.yaml:4"])
    has = f"names {revision!r}" if revision else "has no revision"
    assert str(refused.value) == (
        f"f.yaml:4: m {has}; write `revision:` with the commit of org/name, 40 hexadecimal digits, "
        "so that every server gets the same files. The newest is printed by: git ls-remote "
        "https://huggingface.co/org/name HEAD"
    )


def test_the_line_of_a_model_without_a_commit_is_told_or_that_there_is_nothing_to_download(
    tmp_path: Path,
) -> None:
    file = tmp_path / "f.yaml"
    shipped = (ROOT / "serve_config.yaml").read_text(encoding="utf-8")
    file.write_text(shipped)
    result = CliRunner().invoke(app, ["download", str(file)])
    told = f"{file} names no model of the hub: there is nothing to download\n"
    assert (result.exit_code, result.output) == (0, told)
    text = shipped.replace("source: models/pydoc-chat", "source: org/name")
    file.write_text(text)
    line = 1 + next(i for i, each in enumerate(text.splitlines()) if "id: pydoc-chat" in each)
    result = CliRunner().invoke(app, ["download", str(file)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {file}:{line}: pydoc-chat has no revision; write")


def test_a_complete_model_is_not_downloaded_again(tmp_path: Path) -> None:
    hub, told = FakeHub("model.safetensors"), list[str]()
    download([MODEL], tmp_path, hub, told.append)
    download([MODEL], tmp_path, hub, told.append)
    assert hub.asked == [("org/name", SHA)]
    assert told[-1] == f"org/name@{SHA} is there"


def test_another_commit_is_another_download(tmp_path: Path) -> None:
    hub = FakeHub("model.safetensors")
    download([MODEL, HubModel("org/name", "b" * 40)], tmp_path, hub, lambda _: None)
    assert [revision for _, revision in hub.asked] == [SHA, "b" * 40]


def test_pickled_weights_alone_are_refused_and_never_marked(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no safetensors"):
        download([MODEL], tmp_path, FakeHub("pytorch_model.bin"), lambda _: None)
    assert not MODEL.marker(tmp_path).exists()


def test_a_waiting_server_goes_on_when_the_last_model_is_marked(tmp_path: Path) -> None:
    now, told = [0.0], list[str]()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 130:
            download([MODEL], tmp_path, FakeHub("model.safetensors"), lambda _: None)

    wait([MODEL], tmp_path, told.append, lambda: now[0], sleep)
    assert now[0] == 130
    assert len(told) == 3  # at once, and after each minute
    assert f"waiting for org/name@{SHA}" in told[0]


def test_the_command_waits_for_the_models_of_an_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for source, revision in (
        ("google/gemma-3-12b-it", "96b6f1eccf38110c56df3a15bffe176da04bfd80"),
        ("TrustSafeAI/RADAR-Vicuna-7B", "4ff1f23a69a36aa1df47b0933be6279f1b896c9b"),
    ):
        download(
            [HubModel(source, revision)], tmp_path, FakeHub("model.safetensors"), lambda _: None
        )
    result = CliRunner().invoke(app, ["download", "--wait", str(GPU_OVERLAY)])
    assert (result.exit_code, result.output) == (0, "")


def test_a_file_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    result = CliRunner().invoke(app, ["download", str(file)])
    assert result.exit_code == 1
    assert result.output == f"Error: {file}: No such file or directory\n"


@pytest.mark.slow
def test_a_server_without_a_network_reads_the_commit_from_the_cache(tmp_path: Path) -> None:
    hub = FakeHub("model.safetensors")
    download([MODEL], tmp_path, hub, lambda _: None)
    folder = tmp_path / "models--org--name" / "snapshots" / SHA
    (folder / "config.json").write_bytes(config_file("qwen2.5-7b-instruct").read_bytes())
    code = (
        "from transformers import AutoConfig; "
        f"print(AutoConfig.from_pretrained('org/name', revision='{SHA}').model_type)"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ended.stdout.strip() == json.loads((folder / "config.json").read_text())["model_type"]


def test_a_folder_of_an_unknown_user_is_refused_in_one_line() -> None:
    model = ModelConfig(id="m", source="~nosuchuser/x")
    with pytest.raises(
        DownloadError, match=r"f.yaml:4: m: there is no folder .* ~nosuchuser is no home here"
    ):
        hub_models([model], ["f.yaml:4"])
