"""The route that a client meant when it asked for a path that does not exist.

Clients write paths with a slash too many, without `/v1`, or with `/v1` twice, because their base
URL ends in it. Such a path is not redirected: many clients repeat a redirected POST as a GET,
without its body. The 404 names the route instead.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Final
from urllib.parse import quote

from starlette.routing import BaseRoute, Route
from starlette.types import Scope

MAX_PATH_LENGTH: Final = 256
"""Characters of a path that are compared with routes and repeated in a message."""

MAX_NUM_PREFIXES: Final = 4
"""Leading parts of a path that may be too many, as in `/api/openai/v1/models`."""

VERSION_PREFIX: Final = "/v1"
MIN_SIMILARITY: Final = 0.85


def route_hint(path: str, routes: Sequence[BaseRoute]) -> str | None:
    """Return the methods and the path of the route that was probably meant, such as `GET /docs`.

    Args:
        path: The path as the router sees it, without the root path.
        routes: The application's routes.
    """
    known = [route for route in routes if isinstance(route, Route)]
    for meant in _variants(path[:MAX_PATH_LENGTH]):
        for route in known:
            if route.path_regex.match(meant):
                return _named(route)
    by_path = {route.path_format: route for route in known}
    similar = get_close_matches(_clean(path[:MAX_PATH_LENGTH]), by_path, 1, MIN_SIMILARITY)
    return _named(by_path[similar[0]]) if similar else None


def path_of(scope: Scope) -> str:
    """Return the path below Serve's route prefix. A mount has changed the scope's `root_path`."""
    root: str = scope.get("app_root_path", scope.get("root_path", ""))
    path: str = scope["path"]
    return path.removeprefix(root)


def shown_path(path: str) -> str:
    """Return a path for a message: bounded, and escaped as in a URL."""
    return quote(path[:MAX_PATH_LENGTH], safe="/:@!$&'()*+,;=~")[:MAX_PATH_LENGTH]


def _variants(path: str) -> Iterator[str]:
    """Yield the path with its slashes in order, then without leading parts, then below /v1."""
    clean = _clean(path)
    cuts = [match.start() for match in islice(re.finditer("/", clean), MAX_NUM_PREFIXES + 1)]
    for prefix in ("", VERSION_PREFIX):
        for cut in cuts:
            yield prefix + clean[cut:]


def _clean(path: str) -> str:
    return re.sub("/{2,}", "/", f"/{path}").rstrip("/") or "/"


def _named(route: Route) -> str:
    # HEAD is answered wherever GET is.
    methods = sorted((route.methods or set()) - {"HEAD"})
    return f"{' or '.join(methods)} {route.path_format}"
