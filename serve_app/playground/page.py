"""The page at `/` and the files that it loads: which there are, and how they are served.

The files hold no data, so they need no key (`serve_app.middleware.auth`): a browser can't send one
before a page has asked for it. What the page then asks the server goes behind the keys. All URLs in
the files are relative, so that the page works below a route prefix.
"""

import os
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from serve_app.http.page_headers import PAGE_HEADERS

FOLDER: Final = Path(__file__).parent / "static"
MOUNT: Final = "/playground"
INDEX: Final = "index.html"

PAGE_PATHS: Final = frozenset(
    {"/"} | {f"{MOUNT}/{file.relative_to(FOLDER).as_posix()}" for file in FOLDER.rglob("*.*")}
)
"""The paths of the page and of each file that it may load."""

# Browsers keep the files, but ask each time whether they are the newest.
REVALIDATE: Final = {"Cache-Control": "no-cache"}


class PageFiles(StaticFiles):
    """Serves the files with the page's headers, and answers 304 to a browser that has the file."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """Return the answer for a file that exists."""
        answer = super().file_response(full_path, stat_result, scope, status_code)
        answer.headers.update({**PAGE_HEADERS, **REVALIDATE})
        if os.fspath(full_path).endswith(".gz"):
            answer.headers["Content-Type"] = "application/gzip"
        return answer


def install_page(app: FastAPI) -> None:
    """Serve the page and its files."""
    files = PageFiles(directory=FOLDER)

    async def page(request: Request) -> Response:
        return await files.get_response(INDEX, request.scope)

    app.add_api_route("/", page, include_in_schema=False)
    app.mount(MOUNT, files)
