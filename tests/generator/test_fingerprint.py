import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from deployments.contract.model_spec import ModelSpec
from deployments.generator.fingerprint import (
    content_digest,
    model_folder,
    system_fingerprint,
    versions_of,
)
from tests.deployments.tiny_folder import spec

CPU = torch.device("cpu")

FILES = {
    "model.safetensors": b"weights",
    "config.json": b"{}",
    "tokenizer.json": b"tokens",
    "chat_template.jinja": b"template",
    "README.md": b"card",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "model")


def written(folder: Path) -> Path:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_copies_of_the_same_files_have_one_digest(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    assert content_digest(copy) == content_digest(folder)


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"README.md"}))
def test_another_content_is_another_digest(folder: Path, name: str) -> None:
    before = content_digest(folder)
    (folder / name).write_bytes(FILES[name].swapcase() + b" ")
    assert content_digest(folder) != before


def test_a_card_is_not_part_of_the_model(folder: Path) -> None:
    before = content_digest(folder)
    (folder / "README.md").write_text("another card")
    assert content_digest(folder) == before


def test_swapped_shards_are_another_digest(folder: Path, tmp_path: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"1")
    (folder / "b.safetensors").write_bytes(b"2")
    before = content_digest(folder)
    (folder / "a.safetensors").write_bytes(b"2")
    (folder / "b.safetensors").write_bytes(b"1")
    assert content_digest(folder) != before


def test_large_files_of_the_hubs_cache_are_not_read(folder: Path, tmp_path: Path) -> None:
    expected = content_digest(folder)
    snapshot = tmp_path / "snapshots" / "1"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, content in FILES.items():
        is_large = name == "model.safetensors"
        algorithm = "sha256" if is_large else "sha1"  # as the hub names them
        blob = blobs / hashlib.new(algorithm, content).hexdigest()
        blob.write_bytes(b"not read" if is_large else content)
        (snapshot / name).symlink_to(blob)
    assert content_digest(snapshot) == expected


def test_a_folder_is_its_own_source(folder: Path) -> None:
    assert model_folder(spec(folder)) == folder


def fingerprint(model: ModelSpec, content: str = "c") -> str:
    return system_fingerprint(content, versions_of(model, CPU))


def test_replicas_of_one_configuration_have_one_fingerprint() -> None:
    name = fingerprint(spec("m"))
    assert name == fingerprint(spec("m"))
    assert len(name) == len("fp_0123456789")


@pytest.mark.parametrize("changed", [spec("m", dtype="bfloat16"), spec("m", quantization="int8")])
def test_settings_that_change_the_texts_change_the_fingerprint(changed: ModelSpec) -> None:
    assert fingerprint(changed) != fingerprint(spec("m"))


def test_other_files_change_the_fingerprint() -> None:
    assert fingerprint(spec("m"), "d") != fingerprint(spec("m"))


def test_the_folders_name_and_settings_of_speed_do_not_change_it() -> None:
    assert fingerprint(spec("n", num_threads=3)) == fingerprint(spec("m"))
