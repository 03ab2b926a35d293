"""`GET /docs`: Swagger UI, served from here alone.

The page loads nothing from elsewhere, so it works without the internet and tells nobody that it was
opened; and its policy lets it load nothing from elsewhere, whatever a description might hold.
"""

from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

PAGE: Final = Path(__file__).parent / "docs_page"

SWAGGER_UI: Final = ("fastapi_offline", "static")
"""A package that carries Swagger UI's files, and the folder where they lie; no code of it runs."""

HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            # The style sheet holds its icons as data: URIs.
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def install_docs(app: FastAPI) -> None:
    """Serve the page, and beside it what it loads."""
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.mount("/docs", StaticFiles(directory=PAGE, packages=[SWAGGER_UI]))


async def _page() -> FileResponse:
    return FileResponse(PAGE / "index.html", headers=HEADERS)
