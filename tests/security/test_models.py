"""Attacks through loading models, keeping them alive, and data between processes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deployments.contract.errors import ReplicaUnavailableError
from tests.serve_app.apps import CHAT, client_of, make_app, question
from tests.serve_app.fakes import FakeBackend

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for room in ("serve_app", "deployments") for path in (ROOT / room).rglob("*.py")
)
LOADERS = [
    ROOT / "deployments" / "engine" / "model" / "loader.py",
    ROOT / "deployments" / "compute" / "model_files.py",
    ROOT / "deployments" / "compute" / "tokenizer_files.py",
    ROOT / "serve_app" / "commands" / "check" / "plan.py",
]
LOADS = re.compile(r"(?:c?[pP]ickle|dill|marshal|shelve|joblib)$")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.slow
def test_cve_2026_27893_47155_41523_no_check_depends_on_assert() -> None:
    # With -O Python drops asserts, except those of tests, which pytest rewrites.
    flags = ["-q", f"--ignore={__file__}", "-W", "ignore::pytest.PytestConfigWarning"]
    command = [sys.executable, "-O", "-m", "pytest", *flags, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


async def test_cve_2026_114051_pysec_2026_145_health_exercises_the_engine(
    backend: FakeBackend,
) -> None:
    async with client_of(make_app(backend)) as client:
        assert (await client.get("/health")).status_code == 200
        backend.sickness = ReplicaUnavailableError("The engine is dead.")
        assert (await client.get("/health")).status_code == 503
        # A request that fails does not affect others.
        backend.sickness = None
        backend.scripts = [RuntimeError("one request's own bug")]
        await client.ask(CHAT, question(), 500)
        assert (await client.post(CHAT, json=question())).status_code == 200


def test_cve_2026_27893_47155_41523_no_code_is_loaded_with_a_model() -> None:
    text = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert not [path for path in SOURCES if re.search(r"trust_remote_code\W+True", text[path])]
    assert {path for path in SOURCES if "from_pretrained(" in text[path]} == set(LOADERS)
    loads = [
        (loader, ast.unparse(call))
        for loader in LOADERS
        for call in calls(loader)
        if ast.unparse(call.func).endswith("from_pretrained")
    ]
    assert len(loads) >= 6
    for loader, call in loads:
        if "**options" in call:
            assert '"revision": revision, "trust_remote_code": False' in text[loader]
        else:
            assert "revision=revision, trust_remote_code=False" in call


def test_cve_2025_32434_cve_2026_24747_weights_are_only_safetensors() -> None:
    weights = ROOT / "deployments" / "compute" / "model_files.py"  # the others read no weights
    assert "use_safetensors=True" in weights.read_text(encoding="utf-8")
    for path in SOURCES:
        assert not [c for c in calls(path) if ast.unparse(c.func) == "torch.load"], path


def test_cve_2026_3059_3060_cve_2025_27520_nothing_from_outside_is_unpickled() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in (*imports(path), *(ast.unparse(call.func) for call in calls(path)))
        if LOADS.search(name) or name in ("eval", "exec", "yaml.unsafe_load")
    ]
    assert found == []
