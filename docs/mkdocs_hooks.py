"""Gives mkdocs the project's Markdown files as they are, at their own paths; see docs/mkdocs.yml.

The site has every Markdown file of the project and every file that one of them links to, so that
links between docs/, k8s/, benchmarks/ and README.md lead where they lead in the repository. The
menu is the index in docs/README.md.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tests.docs.pages import MARK, ROOT, Page, pages

INDEX: Final = "docs/README.md"

_FENCE: Final = re.compile(r"^(\s*`{3,}\w+) (.+)$", re.MULTILINE)
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)\)")


def on_config(config: MkDocsConfig) -> None:
    """Make the menu."""
    config.nav = ["README.md", INDEX, *_menu({page.name for page in pages()})]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Replace what mkdocs has found in its folder by the project's files."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for name in sorted(set(_names())):
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write examples as mkdocs reads them, and leave out links to folders, which have no page."""
    folder = (ROOT / page.file.src_uri).parent

    def fence(info: re.Match[str]) -> str:
        return info[1] if MARK.fullmatch(info[2]) else f'{info[1]} title="{info[2]}"'

    def without_folder(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    return _LINK.sub(without_folder, _FENCE.sub(fence, markdown))


def _names() -> Iterator[str]:
    """Yield the paths of the pages and of what they link to, from the project's root."""
    for page in pages():
        yield page.name
        for link in page.links:
            target = (page.path.parent / unquote(link.partition("#")[0])).resolve()
            if "://" not in link and target.is_file():
                yield target.relative_to(ROOT).as_posix()


def _menu(names: set[str]) -> Iterator[dict[str, list[str]]]:
    """Yield the sections of the index, the decisions, and the pages that the index leaves out."""
    left = names - {"README.md"}
    for title, links in _sections(Page(ROOT / INDEX)):
        section = [name for name in links if name in left]
        left -= {*section}
        yield {title: section}
    decisions = sorted(name for name in left if name.startswith("docs/decisions/"))
    yield {"Decisions": decisions}
    yield {"Other files": sorted(left - {*decisions, INDEX})}


def _sections(index: Page) -> Iterator[tuple[str, list[str]]]:
    """Yield each title of the index, a line with a colon, and the pages below it."""
    title, links = "", list[str]()
    for token in index.tokens:
        if token.type != "inline":
            continue
        if token.content.endswith(":"):
            if links:
                yield title, links
            title, links = token.content.removesuffix(":"), []
        targets = (
            str(child.attrs["href"]) for child in token.children or () if child.attrs.get("href")
        )
        links += [_from_root(target) for target in targets]
    yield title, links


def _from_root(link: str) -> str:
    path = (ROOT / PurePosixPath(INDEX).parent / link).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(Path(link))
