"""The examples of OpenAI's SDK for Python run unchanged: those of its README, and of its source.

The README comes with the installed package, the source by pip from the registry; tests that need
that have the mark `soak`. The models have the names that the examples ask for, and say what the
examples wait for.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from serve_app.config import AppConfig
from tests.clients.real.environments import CACHE
from tests.engines import ROOT
from tests.scripted_model import save_scripted_model
from tests.serve_app.local_server import local_server

DEADLINE_S = 120
VERSION: Final = importlib.metadata.version("openai")
README_MODEL = "gpt-5.5"
UNSERVED = ("image", "workload_identity", "httpx2", "Aio")
"""What a block of the README has that needs files, another login or another HTTP client."""

MATH = (
    (
        '{"steps": [{"explanation": "',
        # The examples leave their streams at the tenth event, which must not be the last.
        *(f"think {at:04d}, " for at in range(1500)),
        'and divide by 8.", "output": "x = -29/8"}], ',
        '"final_answer": "x = -29/8"}',
    ),
)
QUERY = (("<tool_call>\n",),)
SKUS = tuple(
    turn
    for name in ("get_sku_inventory", "get_supplier_eta", "get_quality_alerts")
    for turn in ((), (f"This is what {name} ", f"has told of {name}."))
)
"""Each call is demanded, and a grammar writes it."""

HELLO = (("Hello, ", "there."), ("And good", "bye."))
EXAMPLES: Final = {
    "responses/background.py": ("gpt-4o-2024-08-06", MATH, "and divide by 8."),
    "responses/background_async.py": ("gpt-4o-2024-08-06", MATH, "and divide by 8."),
    "responses/background_streaming.py": ("gpt-4o-2024-08-06", MATH, "final_answer='x = -29/8'"),
    "responses/background_streaming_async.py": (
        "gpt-4o-2024-08-06",
        MATH,
        "final_answer='x = -29/8'",
    ),
    "responses/streaming.py": ("gpt-4o-2024-08-06", MATH, "final_answer='x = -29/8'"),
    "responses/streaming_tools.py": ("gpt-4o-2024-08-06", QUERY, "parsed_arguments=Query("),
    "responses/structured_outputs.py": ("gpt-4o-2024-08-06", MATH, "answer: x = -29/8"),
    "responses/structured_outputs_tools.py": ("gpt-4o-2024-08-06", QUERY, "table name: "),
    "responses/websocket.py": ("gpt-5.2", SKUS, "has told of get_quality_alerts."),
    "responses_websocket.py": ("gpt-4o-mini", HELLO, "completed"),
}
"""The model that each example asks, what it says, and what the example then prints."""


def readme_examples() -> list[str]:
    """Return the README's whole programs that ask a model for texts."""
    readme = importlib.metadata.distribution("openai").read_text("METADATA")
    return [
        block
        for block in re.findall(r"^```python\n(.*?)^```", str(readme), re.MULTILINE | re.DOTALL)
        if f'model="{README_MODEL}"' in block
        and "import" in block
        and "OpenAI(" in block
        and not any(mark in block for mark in UNSERVED)
    ]


def run_example(path: Path, url: str) -> str:
    """Run a program against a server; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"},
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def config(model: str, source: Path, folder: Path) -> AppConfig:
    entry = {"id": model, "source": str(source), "num_threads": 1, "num_cpus": 0}
    return AppConfig.model_validate({"models": [entry], "jobs": {"folder": str(folder / "jobs")}})


@pytest.fixture(scope="module")
def pydoc_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve pydoc-chat by the name of the README's model."""
    folder = tmp_path_factory.mktemp("readme")
    with (
        local_server(config(README_MODEL, ROOT / "models/pydoc-chat", folder)) as local,
        local.listening() as url,
    ):
        yield url


@pytest.mark.slow
def test_the_programs_of_the_readme_run(pydoc_url: str, tmp_path: Path) -> None:
    found = readme_examples()
    assert len(found) >= 6
    for at, block in enumerate(found):
        path = tmp_path / f"example_{at}.py"
        path.write_text(block)
        run_example(path, pydoc_url)


@pytest.fixture(scope="module")
def source() -> Path:
    """Return the folder of the examples in the SDK's source, which pip downloads once."""
    name = f"openai-{VERSION}"
    folder = CACHE / name / "examples"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        only = ["--no-deps", "--no-binary", "openai", "--no-build-isolation"]
        subprocess.run([*pip, *only, "--dest", str(CACHE), f"openai=={VERSION}"], check=True)
        with tarfile.open(CACHE / f"{name}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_the_source_runs(source: Path, tmp_path: Path, example: str) -> None:
    model, turns, told = EXAMPLES[example]
    scripted = save_scripted_model(tmp_path / "scripted", turns)
    with local_server(config(model, scripted, tmp_path)) as local, local.listening() as url:
        printed = run_example(source / example, url)
    assert told in " ".join(printed.split())


@pytest.mark.soak
def test_all_examples_of_responses_are_run(source: Path) -> None:
    found: Sequence[str] = [
        str(path.relative_to(source))
        for path in [*source.glob("responses/*.py"), *source.glob("responses_*.py")]
    ]
    left_out = {
        "responses/__init__.py",
        # Of OpenAI's own agents, and a count that only OpenAI's server has.
        "responses/multi_agent_streaming.py",
        "responses/multi_agent_websocket.py",
        "responses_input_tokens.py",
    }
    assert set(found) - left_out == EXAMPLES.keys()
