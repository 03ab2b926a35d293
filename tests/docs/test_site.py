"""The site of `make docs` is built without a warning, and shows what the repository shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, pages

PARTS = {
    "list items": ({"list_item_open"}, re.compile("<li>")),
    "rows": ({"tr_open"}, re.compile("<tr>")),
    "examples": ({"fence", "code_block"}, re.compile("<pre[ >]")),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run(
        [*command, "--config-file", "docs/mkdocs.yml", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


def test_the_site_has_every_page_with_all_its_lists_tables_and_examples(site: Path) -> None:
    offenders = [f"{page.name}: {part}" for page in pages() for part in missing(page, site)]
    assert offenders == []


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|link rel=\"(?!canonical)[^\"]*\")[^>]*(?:src|href)=\"https?:"
    )
    assert [file.name for file in site.rglob("*.html") if loads.search(file.read_text())] == []


def missing(page: Page, site: Path) -> list[str]:
    """Return the parts of which the site's page has another number than the file."""
    name = page.path.with_suffix(".html").name.replace("README.html", "index.html")
    html = (site / page.path.relative_to(ROOT).with_name(name)).read_text()
    article = html[html.index("<article") : html.index("</article>")]
    return [
        part
        for part, (kinds, tag) in PARTS.items()
        if sum(token.type in kinds for token in page.tokens) != len(tag.findall(article))
    ]
