import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from deployments.contract.descriptions import Task
from serve_app.commands.check import model_source
from serve_app.commands.check.model_source import is_folder, read_files
from serve_app.commands.check.source_files import ModelFiles, SourceError
from serve_app.commands.check.source_problems import problems
from tests.offenders import every, for_each

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = ROOT / "models"

LAYOUT: dict[str, str | bytes] = {"config.json": '{"model_type": "qwen2"}', "tokenizer.json": "{}"}
TENSORS = b"\x00" * 8
QUANTIZED = '{"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}'
INDEX = '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WHOLE = struct.pack("<Q", len(HEADER)) + HEADER + TENSORS


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def wrong_with(folder: Path) -> list[str]:
    try:
        return list(problems(read_files(str(folder), None)))
    except SourceError as error:
        return [str(error)]


@pytest.mark.parametrize(
    ("name", "task"),
    [("pydoc-chat", "generate"), ("pydoc-detector", "classify"), ("pydoc-search", "embed")],
)
def test_the_embedded_models_are_whole_and_of_their_tasks(name: str, task: Task) -> None:
    files = read_files(str(SHIPPED / name), None)
    assert list(problems(files)) == []
    assert files.tasks[0] == task
    assert read_files(f"models/{name}", None).names == files.names  # wherever one is


@for_each(
    ({"architectures": ["Qwen2ForCausalLM"]}, set(), ("generate", "embed")),
    ({"architectures": ["GPT2LMHeadModel"]}, set(), ("generate", "embed")),
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, set(), ("generate", "embed")),
    ({"architectures": ["Qwen3ForCausalLM"]}, {"modules.json"}, ("embed", "generate")),
    ({"architectures": ["BertModel"]}, {"modules.json"}, ("embed",)),
    ({"architectures": ["BertModel"], "model_type": "bert"}, set(), ("embed",)),
    ({"architectures": ["Qwen2Model"], "model_type": "qwen2"}, set(), ("embed", "generate")),
    ({"architectures": ["RobertaForMaskedLM"], "model_type": "roberta"}, set(), ("embed",)),
    ({"architectures": ["RobertaForSequenceClassification"]}, set(), ("classify", "embed")),
    ({"architectures": ["BertForSequenceClassification"]}, {"modules.json"}, ("classify", "embed")),
    ({"architectures": ["BertForTokenClassification"]}, set(), ()),
    ({}, set(), ("generate", "embed")),
)
def test_a_model_s_task_is_found_in_its_files(
    config: dict[str, Any], names: set[str], tasks: tuple[Task, ...]
) -> None:
    assert ModelFiles("m", frozenset(names), None, None, config).tasks == tasks


@pytest.mark.parametrize(
    ("architecture", "task", "message"),
    [
        ("RobertaForMaskedLM", "generate", "which does not generate text; write `task: embed`"),
        ("RobertaForSequenceClassification", "generate", "write `task: classify` or `task: embed`"),
        ("Qwen2ForCausalLM", "classify", "which does not classify texts; write `task: generate`"),
        ("BertForTokenClassification", "classify", "classify texts; take another model"),
        ("Qwen2ForCausalLM", "embed", None),
        ("SomethingNew", "generate", None),
    ],
)
def test_a_task_that_the_model_is_not_made_for_is_named(
    architecture: str, task: Task, message: str | None
) -> None:
    config = {"architectures": [architecture], "model_type": "roberta"}
    found = ModelFiles("m", frozenset(), None, None, config).task_problem(task)
    assert (found is None) if message is None else (found is not None and message in found)


WRONG: list[tuple[dict[str, str | bytes], str]] = [
    ({}, "is an empty folder"),
    ({"a.gguf": "x"}, "has no config.json, but a.gguf (GGUF), which is not served: take the"),
    ({"model_index.json": "{}"}, "holds a pipeline of diffusers"),
    ({"params.json": "{}", "consolidated.safetensors": "x"}, "weights in their maker's own format"),
    ({"sub/config.json": "{}"}, "has no config.json; did you mean '"),
    ({"adapter_config.json": "{}"}, "has an adapter (adapter_config.json)"),
    ({**LAYOUT, "model.safetensors": "", "config.json": "{"}, "its config.json can't be read: "),
    ({**LAYOUT, "model.safetensors": WHOLE, "config.json": "[]"}, "is not a JSON object"),
    ({**LAYOUT, "model.safetensors": WHOLE, "config.json": "{}"}, "has no model_type"),
    (
        {**LAYOUT, "model.safetensors": WHOLE, "config.json": '{"model_type": "nosuch"}'},
        "sets model_type to 'nosuch', which the installed transformers does not know",
    ),
    ({**LAYOUT, "model.safetensors": WHOLE, "config.json": QUANTIZED}, "is quantized (awq)"),
    (LAYOUT, "has no model.safetensors"),
    ({**LAYOUT, "pytorch_model.bin": "x"}, "but pytorch_model.bin (pickled weights, which could"),
    ({**LAYOUT, "model.safetensors": WHOLE[:-1]}, "model.safetensors is cut off: it has"),
    ({**LAYOUT, "model.safetensors": WHOLE[:20]}, "model.safetensors is damaged or cut off"),
    ({**LAYOUT, "model.safetensors": "x"}, "model.safetensors can't be read as safetensors"),
    (
        {**LAYOUT, "model.safetensors": "version https://git-lfs.github.com/spec/v1\n"},
        "only git-lfs pointers lie in the folder in place of model.safetensors",
    ),
    (
        {**LAYOUT, "model.safetensors.index.json": INDEX, "1.safetensors": WHOLE},
        "lacks 1 of the 2 files of weights that its index names, 2.safetensors among them",
    ),
    ({"config.json": LAYOUT["config.json"], "model.safetensors": WHOLE}, "has no tokenizer: "),
]


def test_what_is_wrong_with_a_folder_is_told_in_one_line(tmp_path: Path) -> None:
    for case in every(enumerate(WRONG)):
        with case as (number, (files, message)):
            folder = tmp_path / str(number)
            folder.mkdir()
            (found,) = wrong_with(write(folder, files))
            assert message in found, found
            assert repr(str(folder)) in found


def test_a_whole_folder_has_no_fault(tmp_path: Path) -> None:
    index = '{"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}'
    parts: dict[str, str | bytes] = {"model.safetensors.index.json": index, "1.safetensors": WHOLE}
    assert wrong_with(write(tmp_path / "one", {**LAYOUT, "model.safetensors": WHOLE})) == []
    assert wrong_with(write(tmp_path / "parts", {**LAYOUT, **parts})) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./modles/pydoc-chat", "there is no folder './modles/pydoc-chat'; did you mean 'models/"),
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("~/no-such-model", "there is no folder '~/no-such-model'"),
        (
            "models/pydoc-chat/config.json",
            "is a file; give the model's folder, 'models/pydoc-chat'",
        ),
        ("a/b/c", "can't be the id of a repository on the hub"),
        ("qwen:7b", "can't be the id of a repository on the hub"),
    ],
)
def test_a_source_that_is_no_model_is_told_at_once(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SHIPPED / "pydoc-chat", tmp_path / "models/pydoc-chat")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as caught:
        read_files(source, None)
    assert message in str(caught.value)


class Hub:
    """Stands in for the hub; `raised` is what it answers with."""

    def __init__(self, raised: Exception | float) -> None:
        self.raised = raised

    def model_info(self, *_: object, **__: object) -> None:
        if isinstance(self.raised, Exception):
            raise self.raised
        time.sleep(self.raised)


def response() -> Any:
    import httpx

    return httpx.Response(401, request=httpx.Request("GET", "https://huggingface.co/x"))


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (OSError("Name or service not known"), "can't be reached: Name or service not known"),
        (30.0, "has not answered in 0.05 s; if it is only slow, set HF_HUB_ETAG_TIMEOUT"),
        ("missing", "and no repository of this name is on the hub, or it is not yours to see"),
        ("gated", "asks for an account that has accepted its licence on the hub: set HF_TOKEN"),
    ],
)
def test_a_repository_that_is_neither_cached_nor_reachable_is_told_in_seconds(
    raised: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"missing": RepositoryNotFoundError, "gated": GatedRepoError}
    if raised in named:
        raised = named[raised]("401", response=response())
    monkeypatch.setattr(model_source, "HfApi", lambda: Hub(raised))
    # Only silence has to be waited for: a busy machine may take a while to raise the others.
    monkeypatch.setattr(model_source, "HUB_TIMEOUT_S", 0.05 if raised == 30.0 else 60.0)
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    with pytest.raises(SourceError) as caught:
        read_files("some-owner/nosuch", None)
    assert message in str(caught.value)


def test_a_repository_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    repository = tmp_path / "models--some--model"
    write(repository / "snapshots" / commit, {**LAYOUT, "model.safetensors": WHOLE})
    write(repository / "refs", {"main": commit})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(model_source, "HfApi", lambda: Hub(OSError("no network")))
    files = read_files("some/model", None)
    assert (files.commit, list(problems(files))) == (commit, [])
    (repository / "snapshots" / commit / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="is not, or not wholly, in the cache"):
        read_files("some/model", None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("~nosuchuser/x", "~nosuchuser is no home here"),
        ("x" * 300, "can't be read: File name too long"),
        ("./" + "x" * 300, "can't be read: File name too long"),
    ],
)
def test_a_path_that_the_system_refuses_is_told_in_one_line(source: str, message: str) -> None:
    assert not is_folder(source)
    with pytest.raises(SourceError, match=message):
        read_files(source, None)


def test_a_folder_that_this_user_can_t_enter_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "m", {**LAYOUT, "model.safetensors": WHOLE})
    files = read_files(str(folder), None)

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    # The administrator, who may run the tests, may enter every folder.
    with monkeypatch.context() as patch:
        patch.setattr(model_source, "access", lambda *_: False)
        assert wrong_with(folder) == [f"{str(folder)!r} can't be read: Permission denied"]
    monkeypatch.setattr(Path, "is_file", refuse)
    assert list(problems(files)) == [f"{str(folder)!r} can't be read: Permission denied"]
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert not is_folder(str(folder))
    assert wrong_with(folder) == [f"{str(folder)!r} can't be read: Permission denied"]
