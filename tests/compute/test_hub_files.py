import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from deployments.compute.hub_files import CHUNK_BYTES, download_files
from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.plan.checkpoint import INDEX, shards_of, weights_of
from tests.hub_server import HubServer, serving_hub

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
READ = {"config.json": 10, "tokenizer.json": 500, INDEX: 0, SHARDS[0]: 300_000, SHARDS[1]: 50_000}
UNREAD = {"consolidated.safetensors": 350_000, "pytorch_model.bin": 9, "original/a.pth": 9}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a repository with shards, and files of other formats; use a cache of its own."""
    folder = tmp_path / "repository"
    for name, size in (READ | UNREAD).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}}
    (folder / INDEX).write_text(json.dumps(index))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", constants.DOWNLOAD_CHUNK_SIZE)
    with serving_hub(folder) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield server


def test_what_a_model_is_loaded_from_is_downloaded_once_and_counted(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = StartProgress()
    download_files("org/model", None, progress)
    report = progress.report()
    assert report.phase is StartPhase.DOWNLOADING
    assert sorted(hub.downloaded) == sorted(READ)
    assert (report.num_files, report.total_files) == (5, 5)
    assert "Fetching" not in capsys.readouterr().err
    # The index was read before, to learn what there is.
    assert report.num_bytes == report.total_bytes == 350_510
    assert weights_of("org/model", None) == (2, 350_000)
    download_files("org/model", None, again := StartProgress())
    assert again.report().phase is StartPhase.PREPARING
    assert len(hub.downloaded) == len(READ)


def test_a_large_file_is_counted_while_it_comes(hub: HubServer) -> None:
    (hub.folder / SHARDS[0]).write_bytes(b"x" * (3 * CHUNK_BYTES))
    seen: list[int] = []

    class Watched(StartProgress):
        def add(self, *, num_bytes: int = 0, num_files: int = 0, num_tensors: int = 0) -> None:
            seen.append(num_bytes)
            super().add(num_bytes=num_bytes, num_files=num_files, num_tensors=num_tensors)

    download_files("org/model", None, Watched())
    assert max(seen) == CHUNK_BYTES


def test_a_model_in_one_file_has_one_shard(hub: HubServer) -> None:
    (hub.folder / INDEX).unlink()
    assert shards_of("org/model", None) == ("model.safetensors",)


def test_a_hub_that_can_t_be_reached_is_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    progress = StartProgress()
    download_files("org/other", None, progress)
    assert progress.report().phase is StartPhase.PREPARING


def test_a_folder_is_not_downloaded(hub: HubServer) -> None:
    download_files(str(hub.folder), None, StartProgress())
    assert hub.downloaded == []
    assert weights_of(str(hub.folder), None) == (2, 350_000)
