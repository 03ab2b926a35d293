import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import ROOT, Page, guides, pages

EXTERNAL = ("http", "https")
PYTHON_FILE = re.compile(r"[\w./-]+\.py")
FOREIGN_FILES = {
    "explain.py", "locustfile.py",  # the reader saves these
    "queue.py", "serve_app.py", "yaml.py",  # of others
    "deployment_scheduler.py", "ray/_private/worker.py",  # Ray's
}  # fmt: skip


def test_relative_links_and_anchors_resolve() -> None:
    links = [(page, link) for page in pages() for link in page.links if is_relative(link)]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not resolves(page, link)] == []


def test_python_files_that_the_documents_name_are_where_they_say() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True)
    ends = {end for file in listed.stdout.decode().split() for end in ends_of(file)}
    named = [
        (page.name, word)
        for page in pages()
        if page.name in ("README.md", "CONTRIBUTING.md") or page.name.startswith("docs/")
        for token in page.inlines
        if token.type == "code_inline"
        for word in token.content.split()
        if PYTHON_FILE.fullmatch(word)
    ]
    assert ("docs/decisions/device.md", "deployments/plan/replica_plan.py") in named
    assert [each for each in named if each[1] not in ends | FOREIGN_FILES] == []


def ends_of(file: str) -> set[str]:
    """Return the ways to name a file: by its whole path, or without its first folders."""
    parts = file.split("/")
    return {"/".join(parts[at:]) for at in range(len(parts))}


def test_external_links_are_well_formed() -> None:
    links = [(page, link) for page in pages() for link in page.links if not is_relative(link)]
    assert links
    assert [f"{page.name}: {link}" for page, link in links if not is_well_formed(link)] == []


def test_reference_links_are_defined() -> None:
    assert [f"{page.name}: {it}" for page in pages() for it in page.undefined_references] == []


def test_every_page_of_docs_is_in_the_index() -> None:
    index = Page(ROOT / "docs/README.md")
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in index.links}
    here = {page.path for page in guides() if page.path.parent == index.path.parent}
    assert here - {index.path} <= linked


def test_a_missing_file_a_missing_anchor_and_an_undefined_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# A `b`, c!\n\n## A `b`, c!\n\n<a id="here"></a>\n')
    page = Page(tmp_path / "page.md")
    good = ["other.md", "other.md#a-b-c", "other.md#a-b-c-1", "other.md#here", "#title"]
    bad = ["nowhere.md", "other.md#a-b", "#titles"]
    page.path.write_text("# Title\n\n" + "".join(f"[x]({link})\n" for link in good + bad))
    assert page.links == good + bad
    assert [link for link in page.links if not resolves(page, link)] == bad
    other = Page(tmp_path / "references.md")
    other.path.write_text("[x][known], `[x][code]`, [x][unknown]\n\n[known]: http://e.org\n")
    assert other.undefined_references == ["[x][unknown]"]


@pytest.mark.parametrize(
    "link", ["https:/one-slash.org", "http://", "https://a b.org", "ftp://a.org"]
)
def test_a_malformed_address_is_found(link: str) -> None:
    assert not is_well_formed(link)


def is_relative(link: str) -> bool:
    return not re.match(r"[a-z][a-z+.-]*:", link)


def is_well_formed(link: str) -> bool:
    parts = urlsplit(link)
    return parts.scheme in EXTERNAL and bool(parts.netloc) and not re.search(r"\s", unquote(link))


def resolves(page: Page, link: str) -> bool:
    """Return whether there is such a file, and such a heading in it."""
    file, _, anchor = link.partition("#")
    path = page.path.parent / unquote(file) if file else page.path
    if not path.exists():
        return False
    return not anchor or unquote(anchor) in Page(path.resolve()).anchors
