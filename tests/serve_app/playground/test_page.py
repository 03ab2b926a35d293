"""The page's files as HTTP clients get them; what a browser does with them is tested beside."""

import gzip
import json
import re
from urllib.parse import unquote

from serve_app.playground.page import FOLDER, INDEX, PAGE_PATHS
from tests.offenders import every
from tests.serve_app.apps import ALICE, Client, bearer, client_of, make_app, ring
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import FakeBackend
from tests.serve_app.playground.vendor import (
    ENTRIES,
    LIBRARY,
    LICENCES,
    LOCK,
    PAGES,
    TAG,
    VENDOR,
    digest,
    library_text,
    path_of,
)

MAX_FIRST_BYTES = 420_000
"""What a browser loads before anything is asked, without compression."""
MAX_BYTES = 1_400_000
"""All files, as the wheel holds them."""
IMPORT = re.compile(r'from "\./([^"]+)"')
LATER = re.compile(r'<template id="later">.*</template>', re.DOTALL)


def loaded_first() -> set[str]:
    """Return the files that the page loads when it is opened, by their names below the folder."""
    page = LATER.sub("", (FOLDER / "index.html").read_text())
    found = {"index.html", *re.findall(r'(?:href|src)="playground/([^"]+)"', page)}
    waiting = sorted(found)
    while waiting:
        name = waiting.pop()
        if name.endswith(".js") and not name.startswith("vendor/"):
            new = set(IMPORT.findall((FOLDER / name).read_text())) - found
            found |= new
            waiting.extend(new)
    return found


def test_the_first_load_and_all_files_together_stay_small() -> None:
    sizes = {
        file.relative_to(FOLDER).as_posix(): file.stat().st_size
        for file in FOLDER.rglob("*")
        if file.is_file()
    }
    first = loaded_first()
    assert 200_000 < sum(sizes[name] for name in first) < MAX_FIRST_BYTES
    # A search, a chart, code or a formula loads them.
    assert not first & {
        "standard_library.gz",
        "vendor/uplot.js",
        "vendor/highlight.js",
        "vendor/katex.js",
    }
    assert sum(sizes.values()) < MAX_BYTES


def test_vendored_files_are_those_of_the_lock() -> None:
    lock = json.loads(LOCK.read_text())
    locked = {url: file["digest"] for entry in lock for url, file in entry["files"].items()}
    assert {url: digest(path_of(url).read_bytes()) for url in locked} == locked
    assert set(VENDOR.iterdir()) - set(map(path_of, locked)) == {LICENCES}
    for entry in lock:
        assert re.fullmatch(r"sha512-[\w+/]+==", entry["integrity"])
        assert f"{entry['package']} {entry['version']} ({entry['licence']})" in LICENCES.read_text()


def test_the_pages_check_each_vendored_file_by_the_lock_s_digest() -> None:
    lock = json.loads(LOCK.read_text())
    pages = "".join((folder / INDEX).read_text() for folder in PAGES.values())
    checked = {tag[2]: re.search('integrity="(.*)"', tag[0]) for tag in TAG.finditer(pages)}
    assert {url: tag[1] for url, tag in checked.items() if tag} == {
        url: file["digest"] for entry in lock for url, file in entry["files"].items()
    }


def test_the_entries_are_those_of_pydoc_search() -> None:
    text = gzip.decompress(LIBRARY.read_bytes()).decode()
    assert text == library_text()
    names = [json.loads(line)["name"] for line in ENTRIES.read_text().splitlines()]
    # As library.js reads a line.
    read = [re.match(r"(\S+) ([\w.]+)", line) for line in text.splitlines()]
    assert [found[2] for found in read if found] == names


def test_modules_stay_short_and_import_only_files_that_exist() -> None:
    modules = list(FOLDER.glob("*.js"))
    assert len(modules) > 5
    for module in modules:
        text = module.read_text()
        assert len(text.splitlines()) <= 300
        assert all((FOLDER / name).is_file() for name in IMPORT.findall(text))


async def test_the_page_and_each_of_its_files_are_open(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    for case in every(sorted(PAGE_PATHS)):
        with case as path:
            async with client_of(app) as client:
                answer = await client.get(path)
                head = await client.head(path)
            assert (answer.status_code, head.status_code, head.content) == (200, 200, b"")
            file = FOLDER / (path.removeprefix("/playground/") if path != "/" else "index.html")
            assert answer.content == file.read_bytes()
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
            types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
            if file.suffix in types:
                assert answer.headers["content-type"].startswith(types[file.suffix])


NO_FILES: list[tuple[str, str]] = [
    ("GET", "/playground"),
    ("GET", "/playground/"),
    ("GET", "/playground/nothing.js"),
    ("GET", "/playground/app.js/"),
    ("GET", "/playground/vendor"),
    ("GET", "/playground/vendor/"),
    ("GET", "/playground/../page.py"),
    ("GET", "/playground/%2e%2e/vendored.json"),
    ("GET", "/playground/../../v1/models"),
    ("GET", "/playground/app.js/../../v1/models"),
    ("GET", "//playground/app.js"),
    ("GET", "/PLAYGROUND/app.js"),
    ("GET", "/index.html"),
    ("POST", "/"),
    ("TRACE", "/"),
    ("OPTIONS", "/playground/app.js"),
    ("DELETE", "/playground/app.js"),
]


async def test_what_is_not_a_file_of_the_page_needs_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    for case in every(NO_FILES):
        with case as (method, path):
            async with AsgiCall(app, unquote(path), {}, method=method) as call:
                await call.end()
            assert call.sent[0]["status"] == 401


NOTHING: list[str] = ["/playground/nothing.js", "/playground/vendor", "/playground/../page.py"]


async def test_nothing_else_is_served_to_who_has_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, ring())
    for case in every(NOTHING):
        with case as path:
            async with AsgiCall(app, path, {}, method="GET", headers=bearer(ALICE)) as call:
                await call.end()
            assert call.sent[0]["status"] == 404


async def test_a_browser_that_has_the_newest_file_gets_a_304(client: Client) -> None:
    for path in ("/", "/playground/app.js"):
        first = await client.get(path)
        again = await client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_the_policy_lets_only_this_server_s_files_run(client: Client) -> None:
    page = await client.get("/")
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
    assert policy["img-src"] == "'self' data: blob:"
    assert "unsafe" not in page.headers["content-security-policy"]
    scripts = re.findall(r"<script([^>]*)>([^<]*)</script>", page.text)
    assert scripts
    assert all("src=" in attributes and not content for attributes, content in scripts)


async def test_the_page_works_below_a_route_prefix_and_loads_nothing_from_elsewhere(
    client: Client,
) -> None:
    page = await client.get("/")
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    files = [path for path in loaded if not path.startswith("data:")]
    assert "docs" in files
    for path in files:
        assert not path.startswith(("/", "http"))
        assert (await client.get(f"/{path}")).status_code == 200
