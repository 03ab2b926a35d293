"""The key of a request, and the routes that need one with the scope `operate`.

Such routes show what all users of the server do, or act for all of them. Without keys all users
look alike, so these routes are then open only on a server that no other host can reach, and what
they do can't be asked for by other sites' pages.

A surface protects its routes with one argument:

    APIRouter(dependencies=[Depends(context.operators.require)])
"""

from collections.abc import Collection
from typing import Final

from starlette.requests import Request
from starlette.types import Scope as AsgiScope

from deployments.contract.errors import MissingScopeError
from serve_app.config import ApiKey, Scope
from serve_app.http.origin import require_origin

READING: Final = frozenset({"GET", "HEAD"})
"""Methods that change nothing."""

NO_SCOPE = (
    f"The API key {{name!r}} lacks the scope '{Scope.OPERATE}', which this route needs because it "
    f"shows or changes what concerns all users. Add `scopes: [{Scope.OPERATE}]` to the key's entry "
    "in auth.api_keys_file and deploy again, or ask the operator of this server to do so."
)

NO_KEYS = (
    "This route shows or changes what concerns all users. The server has no API keys and other "
    "hosts can reach it, so the route is closed, whether or not auth.allow_anonymous is true. Make "
    f"a key (`raystream new-key NAME --scope {Scope.OPERATE}`) and name its file under "
    "auth.api_keys_file, or let the server listen only on 127.0.0.1."
)


def note_api_key(scope: AsgiScope, key: ApiKey) -> None:
    """Note the key that has let the request in."""
    scope["state"]["api_key"] = key


def api_key_of(scope: AsgiScope) -> ApiKey | None:
    """Return the key that has let the request in; None if the server asks for none."""
    key: ApiKey | None = scope.get("state", {}).get("api_key")
    return key


class OperatorAccess:
    """Decides which requests may use an operator's routes, and which pages those without a key."""

    def __init__(self, *, is_local: bool = False, origins: Collection[str] = ()) -> None:
        """Set what applies to requests without a key.

        Args:
            is_local: Whether only this machine can reach the server.
            origins: Origins of web pages that may ask besides the server's own.
        """
        self._is_local = is_local
        self._origins = origins

    async def require(self, request: Request) -> None:
        """Return if the request may use an operator's route; a dependency of FastAPI.

        Raises:
            MissingScopeError: It may not; the message says how to mend it.
            ForeignOriginError: It has no key, changes something, and comes from a foreign page.
        """
        key = api_key_of(request.scope)
        if request.method not in READING:
            self.require_own_page(request)
        if key is None and not self._is_local:
            raise MissingScopeError(NO_KEYS)
        if key is not None and Scope.OPERATE not in key.scopes:
            raise MissingScopeError(NO_SCOPE.format(name=key.name))

    def require_own_page(self, request: Request) -> None:
        """Return unless a page of another origin sends the request, which has no key.

        For requests that browsers send for any page without asking the server before: those without
        a body, and forms.

        Raises:
            ForeignOriginError: One does.
        """
        if api_key_of(request.scope) is None:
            require_origin(request.headers, self._origins)
