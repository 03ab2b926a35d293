import json
import logging
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen2ForCausalLM

from deployments.compute.cpu.fusion.ops import OPERATORS
from deployments.compute.kept_files import DIGEST_BYTES, TRACES
from deployments.compute.traced_model import kept_trace
from deployments.compute.traced_model.graph_tracer import trace_graph
from deployments.compute.traced_model.kept_trace import KeptTrace, Trace
from deployments.compute.traced_model.traced_graph import simplify
from tests.engine.tiny_models import qwen2
from tests.offenders import every

NOTES = [[0, 0.1, None], ["a", "b"]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "traces"
    monkeypatch.setattr(kept_trace, "TRACES", replace(TRACES, folder_name=str(folder)))
    return folder


def model_of(width: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(0)
    head = torch.nn.Embedding(9, width), torch.nn.LayerNorm(width)
    layers = torch.nn.Sequential(*head, torch.nn.Linear(width, 3), torch.nn.SiLU())
    return layers.requires_grad_(requires_grad=False)


def place_of(model: torch.nn.Module, purpose: str = "a test") -> KeptTrace:
    return KeptTrace(model, OPERATORS, purpose)


def keep(model: torch.nn.Module) -> Trace:
    """Trace a model, and keep its trace."""
    plain = trace_graph(lambda ids: model(ids)[:, None].mean(-1), (torch.arange(7),))
    simplify(plain)
    made = Trace(plain, None, NOTES)
    place = place_of(model)
    place.prepare(made)
    place.write()
    return made


def test_a_kept_trace_computes_the_same_on_the_weights_of_the_model_that_is_there() -> None:
    made = keep(model_of())
    model = model_of()
    found = place_of(model).read()
    assert found is not None
    assert (found.plain.code, found.fused, found.notes) == (made.plain.code, None, NOTES)
    ids = torch.arange(5)
    expected = made.plain(ids, None)
    assert torch.equal(found.plain(ids, None), expected)
    model.get_parameter("0.weight").mul_(2)
    model.get_parameter("2.weight").mul_(2)
    assert not torch.equal(found.plain(ids, None), expected)


def test_a_model_has_one_place_wherever_its_files_lie(tmp_path: Path) -> None:
    qwen2().save_pretrained(tmp_path / "one")
    copy = shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (Qwen2ForCausalLM.from_pretrained(each) for each in (tmp_path / "one", copy))
    assert one.name_or_path != two.name_or_path
    assert place_of(one)._key == place_of(two)._key is not None


def test_all_that_decides_a_trace_has_a_place_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(model_of())
    assert place_of(model_of()).read() is not None
    assert place_of(model_of(), "another").read() is None
    other_number, other_type, other_class = model_of(), model_of().bfloat16(), model_of()
    setattr(other_number[1], "eps", 1e-3)  # noqa: B010 - not typed
    other_class[3] = torch.nn.ReLU()
    configured, shared = model_of(), model_of()
    setattr(configured[3], "config", PreTrainedConfig())  # noqa: B010 - not typed
    shared[1].bias = shared[1].weight
    for case in every([model_of(8), other_number, other_type, other_class, configured, shared]):
        with case as model:
            assert place_of(model).read() is None
    for module, name in (
        (kept_trace, "source_digest"),
        (kept_trace, "features"),
        (platform, "python_version"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda: {"other": True})
            assert place_of(model_of()).read() is None, name
    for versioned in ("torch", "transformers"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{kept_trace.__name__}.{versioned}.__version__", "0")
            assert place_of(model_of()).read() is None, versioned
    assert len(list(folder.iterdir())) == 1


def by_hand(model: torch.nn.Sequential) -> None:
    model[2].forward = lambda rows: rows[:, :3]


def by_hook(model: torch.nn.Sequential) -> None:
    model[2].register_forward_hook(lambda *_: None)


def by_foreign_class(model: torch.nn.Sequential) -> None:
    class Foreign(torch.nn.SiLU):
        pass

    model[3] = Foreign()


def by_foreign_value(model: torch.nn.Sequential) -> None:
    setattr(model[2], "path", Path())  # noqa: B010 - not typed


@pytest.mark.parametrize("change", [by_hand, by_hook, by_foreign_class, by_foreign_value])
def test_a_model_that_was_changed_by_hand_is_not_kept(
    change: Callable[[torch.nn.Sequential], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    change(model)
    with caplog.at_level(logging.INFO):
        keep(model)
    assert not folder.exists()
    assert "is not kept for later starts" in caplog.text


def test_a_tensor_that_the_model_does_not_hold_is_not_kept(folder: Path) -> None:
    model, other = model_of(), torch.ones(3)
    plain = trace_graph(lambda ids: model(ids) * other, (torch.arange(7),))
    place = place_of(model)
    place.prepare(Trace(plain, None, []))
    place.write()
    assert not folder.exists()


def unknown_operator(found: dict[str, Any]) -> None:
    call = next(n for n in found["graphs"][0]["nodes"] if n[0] == "call_function")
    call[2] = "torch aten.no_such.default"


def foreign_namespace(found: dict[str, Any]) -> None:
    call = next(n for n in found["graphs"][0]["nodes"] if n[0] == "call_function")
    call[2] = "torch profiler._record_function_enter.default"


def unknown_tensor(found: dict[str, Any]) -> None:
    tensors = found["graphs"][0]["tensors"]
    tensors[next(iter(tensors))] = ["1", "no_such"]


def unknown_kind(found: dict[str, Any]) -> None:
    found["notes"] = {"code": "print()"}


def missing_part(found: dict[str, Any]) -> None:
    del found["graphs"]


def missing_node(found: dict[str, Any]) -> None:
    del found["graphs"][0]["nodes"][0]


SPOILING = (
    *(unknown_operator, foreign_namespace, unknown_tensor, unknown_kind, missing_part),
    missing_node,
)


@pytest.mark.parametrize("spoil", SPOILING)
def test_what_is_no_trace_of_the_model_is_passed_over(
    spoil: Callable[[dict[str, Any]], None], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(model_of())
    (path,) = folder.iterdir()
    found = json.loads(path.read_bytes()[DIGEST_BYTES:])
    spoil(found)
    content = json.dumps(found).encode()
    path.write_bytes(sha256(content).digest() + content)
    assert place_of(model_of()).read() is None
    assert "made again" in caplog.text
