import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import Qwen2Config

from deployments.compute import model_files
from deployments.compute.model_files import choose_dtype, read_config, read_labels, wrap_load_errors
from deployments.contract.unsupported_model import UnsupportedModelError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("stored", "asked", "device", "has_bf16", "chosen"),
    [
        ("bfloat16", "auto", CPU, True, torch.bfloat16),
        ("bfloat16", "auto", CPU, False, torch.float32),
        ("bfloat16", "auto", CUDA, False, torch.bfloat16),
        ("float16", "auto", CPU, True, torch.float32),
        ("float16", "auto", CUDA, True, torch.float16),
        ("float32", "auto", CPU, True, torch.float32),
        (None, "auto", CUDA, True, torch.float32),
        ("bfloat16", "float32", CPU, True, torch.float32),
        ("float32", "float16", CPU, True, torch.float16),
    ],
)
def test_auto_keeps_the_files_dtype_unless_the_cpu_is_slow_at_it(
    monkeypatch: pytest.MonkeyPatch,
    stored: str | None,
    asked: str,
    device: torch.device,
    has_bf16: bool,
    chosen: torch.dtype,
) -> None:
    monkeypatch.setattr(model_files, "has_bfloat16", lambda: has_bf16)
    assert choose_dtype(Qwen2Config(dtype=stored), asked, device) is chosen


def wrapped(error: Exception) -> OSError:
    """Return an error that another one led to, as libraries raise them."""
    outer = OSError("the download failed\nwith details")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(28, "No space left on device", "/cache/x.incomplete"), "the disk is full; free"),
        (wrapped(OSError(122, "Disk quota exceeded")), "the disk is full; free some space, or"),
        (wrapped(OSError(30, "Read-only file system", "/.cache")), "set HF_HOME to one"),
        (PermissionError(13, "Permission denied", "/.cache"), "set HF_HOME to one"),
        (SafetensorError("incomplete metadata"), "damaged (incomplete metadata); copy or download"),
        (
            OSError("We couldn't connect to the hub.\nCheck"),
            "no repository of this name was found: We couldn't connect to the hub. Check; check",
        ),
        (ValueError("from one of: \n(1) a file,\n(2) a class"), "one of: (1) a file, (2) a class"),
        (KeyError("added_tokens"), "'org/model': KeyError: 'added_tokens'"),
        (AttributeError("'list' has no 'items'"), "'org/model': AttributeError: 'list' has no 'it"),
        (RuntimeError("failed:" + "\n\tsize mismatch" * 300), "failed: size mismatch size"),
    ],
)
def test_a_load_error_becomes_one_line_that_says_what_to_do(error: Exception, advice: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught, wrap_load_errors("org/model"):
        raise error
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1100


def test_what_a_block_reads_is_named() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="'m': its tokenizer can't be read: Expecting"),
        wrap_load_errors("m", "its tokenizer"),
    ):
        raise ValueError("Expecting value")


def test_a_value_of_the_configuration_that_transformers_does_not_know_is_named() -> None:
    config = Qwen2Config(hidden_act="gelu_of_the_future")
    with pytest.raises(UnsupportedModelError) as caught, wrap_load_errors("m", "weights", config):
        raise KeyError("gelu_of_the_future")
    assert "config.json sets hidden_act to 'gelu_of_the_future', which transformers " in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("id2label", "labels"),
    [
        ({"0": 0, "1": 1}, ("0", "1")),
        ({"0": None, "1": "yes"}, ("LABEL_0", "yes")),
        ({"1": 2.5, "0": True}, ("true", "2.5")),
        ({0: "a", 1: "a"}, ("a", "a")),
        ({str(i): i for i in range(12)}, tuple(map(str, range(12)))),
    ],
)
def test_labels_are_read_in_the_order_of_the_outputs(
    id2label: object, labels: tuple[str, ...]
) -> None:
    assert read_labels("m", id2label) == labels


@pytest.mark.parametrize(
    ("id2label", "problem"),
    [
        ({"0": "a", "2": "b"}, "has 2 entries, but none for the output 1"),
        ({"1": "a", "2": "b"}, "has 2 entries, but none for the output 0"),
        ({"a": "0", "b": "1"}, "has 2 entries, but none for the output 0"),
        ({"0": ["a"], "1": "b"}, "has a list or a mapping in place of a name"),
        ({}, "is empty"),
        (["a", "b"], "is no mapping"),
        ("a", "is no mapping"),
    ],
)
def test_labels_that_name_no_outputs_are_refused(id2label: object, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match="write it as") as caught:
        read_labels("m", id2label)
    assert f"id2label in its config.json {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"id2label": ["a", "b"]}, "id2label in its config.json is no mapping"),
        ({"model_type": "made_up"}, "sets model_type to 'made_up', which transformers "),
        ({"model_type": "made_up", "auto_map": {}}, "code of models is never run here"),
        ({"num_attention_heads": "four"}, "can't be read: StrictDataclassFieldValidationError: "),
    ],
)
def test_a_configuration_that_transformers_can_t_read_is_refused_in_one_line(
    tmp_path: Path, written: dict[str, object], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **written}))
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(str(tmp_path), revision=None)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_git_lfs_pointer_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "README.md").write_text(POINTER)  # not read
    read_config(str(tmp_path), revision=None)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(str(tmp_path), revision=None)
    assert f"in place of {name}; run `git lfs pull` there" in str(caught.value)


def test_a_git_lfs_pointer_in_place_of_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(UnsupportedModelError) as caught, wrap_load_errors(str(tmp_path), "weights"):
        raise SafetensorError("header too large")
    assert "in place of model.safetensors; run `git lfs pull` there" in str(caught.value)


def test_a_folder_that_exists_is_not_called_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught, wrap_load_errors(str(tmp_path)):
        raise OSError(f"{tmp_path} does not appear to have a file named config.json.")
    assert "config.json" in str(caught.value)
    assert "no such folder" not in str(caught.value)
