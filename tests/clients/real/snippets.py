"""The snippets of docs/clients.md: a section for each client, with its blocks of code."""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.real.environments import programs_of
from tests.clients.real.isolation import Finished, run_isolated
from tests.clients_page import ADDRESS, sections
from tests.ray.serve_run import ROOT

HEADING = re.compile(r"(\S+) (\S+)")
"""A client's: its name and the version that the section was tried with."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """A client's section."""

    version: str  # the version that the section was tried with
    files: dict[str, str]  # the blocks that name a file, by its name
    language: str  # `python` or `sh`, the language of the block that is run
    code: str  # that block


def snippets() -> dict[str, Snippet]:
    """Return the page's snippets by client."""
    return {
        heading[1]: _snippet(heading[2], blocks)
        for title, blocks in sections().items()
        if (heading := HEADING.fullmatch(title))
    }


def _snippet(version: str, blocks: Sequence[tuple[str, str, str]]) -> Snippet:
    files = {name: code for _, name, code in blocks if name}
    ((language, _, code),) = [block for block in blocks if not block[1]]
    return Snippet(version, files, language, code)


def run_snippet(client: str, server_url: str) -> Finished:
    """Run a client's snippet in a folder of its own, with the server's address in place of ours."""
    snippet = snippets()[client]
    program = {"python": "python", "sh": "bash"}[snippet.language]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").symlink_to(ROOT / "models")
        for file, code in {**snippet.files, "snippet": snippet.code}.items():
            (folder / file).write_text(code.replace(ADDRESS, server_url))
        return run_isolated([program, "snippet"], programs_of(client), folder)
