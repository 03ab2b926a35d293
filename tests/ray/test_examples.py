"""Runs the examples of README.md and docs/ that are marked `[tested]`, page by page.

Each page has a folder of its own, in which the project's files seem to lie. Examples that name the
server's address get that of the running server.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.commands.run.server_record import own_servers
from tests.clients_page import ADDRESS
from tests.docs.pages import ROOT, Example, Page, guides
from tests.ray.serve_run import Server

DEADLINE_S = 300
PROGRAMS = {"sh": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}
NOT_LINKED = {"serve_config.yaml", "runs"}
"""Files of a page's own: examples may change them."""
SEVERAL = "Several servers run here"
OF_RAY = ("RAY_ADDRESS", "RAY_AUTH_")
"""How variables begin that say which Ray a program joins, and with which token."""
CURL = "silent\nshow-error\nfail-with-body\n"


def examples_of(page: Page) -> list[Example]:
    return [example for example in page.examples if example.mark == "[tested]"]


PAGES = [page for page in guides() if examples_of(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Page, shipped_server: Server, tmp_path: Path) -> None:
    lay_out(tmp_path)
    for example in examples_of(page):
        ended = run(example, tmp_path, shipped_server)
        if SEVERAL in ended.stderr:  # another one has just started
            ended = run(example, tmp_path, shipped_server)
        shown = (ended.stdout + ended.stderr)[-3000:]
        assert ended.returncode == 0, f"{example}\n{shown}"
        assert ended.stdout, example


def run(example: Example, folder: Path, server: Server) -> "subprocess.CompletedProcess[str]":
    command = [*PROGRAMS[example.language], example.code.replace(ADDRESS, server.url)]
    return subprocess.run(
        command, cwd=folder, env=environment(folder, server),
        capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip


def lay_out(folder: Path) -> None:
    """Let the project's files seem to lie in a folder."""
    for path in ROOT.iterdir():
        if path.name not in NOT_LINKED and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copy(ROOT / "serve_config.yaml", folder)
    (folder / ".curlrc").write_text(CURL)


def environment(folder: Path, server: Server) -> dict[str, str]:
    """Return the variables of an example: none names the server's Ray or its token."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(OF_RAY)},
        **address_among_others(server),
        "PATH": programs,
        "CURL_HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }


def address_among_others(server: Server) -> dict[str, str]:
    """Return what a user sets to join this server while others run here."""
    records = [each.record for each in own_servers(os.environ) if each.is_alive]
    (record,) = (each for each in records if each.url == server.url)
    assert record.ray_address is not None
    return {"RAY_ADDRESS": record.ray_address} if len(records) > 1 else {}
