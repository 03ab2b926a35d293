"""What README.md and docs/ show can be run; `tests/ray/test_examples.py` runs it."""

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from serve_app.commands.check.check import find_problems
from serve_app.commands.cli import app
from tests.clients.real.snippets import HEADING
from tests.clients_page import PAGE, sections
from tests.docs.pages import MARK, ROOT, RUN, Example, guides

CONFIGURATIONS = [
    example
    for page in guides()
    for example in page.examples
    if example.language == "yaml" and "applications:" in example.code
]


HUB = {
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b-instruct",
    "google/gemma-3-12b-it": "gemma-3-12b-it",
    "TrustSafeAI/RADAR-Vicuna-7B": "radar-vicuna-7b",
}
"""The files of tests/hub_configs that stand in for the models of docs/gpu.md."""

MARKED = [page for page in guides() if page.path != PAGE]
"""Tests of clients run the examples of docs/clients.md by their headings."""


def test_every_example_is_run_or_says_why_not() -> None:
    unmarked = [
        str(example)
        for page in MARKED
        for example in page.examples
        if example.language in RUN and not MARK.fullmatch(example.mark)
    ]
    assert unmarked == []


def test_every_example_of_the_clients_page_is_run() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    not_run = [
        title
        for title, blocks in sections().items()
        if not HEADING.fullmatch(title)  # those are run in environments of their own
        and f'"{title}"' not in tests
        and any(mark != "[tested]" for _, mark, _ in blocks)
    ]
    assert not_run == []


def test_code_stands_in_fences() -> None:
    assert [f"{page.name}:{line}" for page in guides() for line in page.indented_code] == []


def test_every_configuration_is_correct() -> None:
    assert CONFIGURATIONS
    problems = [
        f"{example}: {problem}"
        for example in CONFIGURATIONS
        for problem in find_problems(example.code)
    ]
    assert problems == []


def planned(example: Example, folder: Path) -> list[dict[str, Any]]:
    """Plan a configuration's models on a card of 48 GB, without asking the hub for them."""
    code = example.code
    for source, name in HUB.items():
        code = code.replace(source, str(ROOT / f"tests/hub_configs/{name}.json"))
    (folder / "configuration.yaml").write_text(code)
    arguments = ["plan", str(folder / "configuration.yaml"), "--gpu-memory", "48GiB", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    models: list[dict[str, Any]] = json.loads(result.output)["models"]
    return models


def test_the_three_configurations_fit_on_a_card_as_their_page_says(tmp_path: Path) -> None:
    (qwen,), (gemma, radar), (alone,) = (
        planned(example, tmp_path) for example in CONFIGURATIONS if example.page == "docs/gpu.md"
    )
    assert all(model["fits"] for model in (qwen, gemma, radar, alone))
    text = " ".join((ROOT / "docs/gpu.md").read_text().split())
    gib, fitting = round(qwen["kv_bytes"] / 2**30), qwen["num_sequences"]
    assert f"{gib} GiB are left for keys and values" in text
    assert (
        f"so {fitting['4096']} conversations of 4,096 tokens, or {fitting['16384']} of 16,384"
        in text
    )


def test_marks_are_few_words() -> None:
    assert MARK.fullmatch("[tested]")
    assert MARK.fullmatch("[not run here: needs a GPU]")
    assert not MARK.fullmatch("[not run here]")
    assert not re.fullmatch(MARK, "")
