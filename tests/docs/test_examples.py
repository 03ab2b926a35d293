"""What README.md and docs/ show can be run; `tests/ray/test_examples.py` runs it."""

import re

import pytest

from serve_app.commands.check import find_problems
from tests.clients.real.snippets import HEADING
from tests.clients_page import PAGE, sections
from tests.docs.pages import MARK, PROGRAMS, ROOT, Example, Page, guides

CONFIGURATIONS = [
    example
    for page in guides()
    for example in page.examples
    if example.language == "yaml" and "applications:" in example.code
]


MARKED = [page for page in guides() if page.path != PAGE]
"""Tests of clients run the examples of docs/clients.md by their headings."""


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_every_example_is_run_or_says_why_not(page: Page) -> None:
    unmarked = [
        str(example)
        for example in page.examples
        if example.language in PROGRAMS and not MARK.fullmatch(example.mark)
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


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_code_stands_in_fences(page: Page) -> None:
    assert page.indented_code == []


@pytest.mark.parametrize("example", CONFIGURATIONS, ids=str)
def test_a_configuration_is_correct(example: Example) -> None:
    assert find_problems(example.code) == []


def test_marks_are_few_words() -> None:
    assert MARK.fullmatch("[tested]")
    assert MARK.fullmatch("[not run here: needs a GPU]")
    assert not MARK.fullmatch("[not run here]")
    assert not re.fullmatch(MARK, "")
