"""`raystream new-key NAME`: makes an API key.

The key is printed once and stored nowhere. Only its hash goes into the file.
"""

import secrets
from collections.abc import Sequence
from typing import Final

from pydantic import ValidationError

from serve_app.config import ApiKey, Scope
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE, PLAIN_RULE, hash_key, is_plain

PREFIX: Final = "sk-raystream-"
"""Clients and scanners for leaked secrets recognize keys by such a prefix."""


class InvalidNameError(ValueError):
    """A key can't have this name."""


class InvalidScopeError(ValueError):
    """There is no such scope."""


class InvalidKeyError(ValueError):
    """No client could send this key, or it could be guessed."""


def hash_of(key: str) -> str:
    """Return the hash of a key of one's own choice.

    Raises:
        InvalidKeyError: It can't be one.
    """
    if not is_plain(key):
        raise InvalidKeyError(f"it must be {PLAIN_RULE}")
    return hash_key(key)


def make_key(name: str, scopes: Sequence[str] = ()) -> str:
    """Make a key; return what to tell its owner.

    Args:
        name: Whose key it is.
        scopes: What it may do besides using the models.

    Raises:
        InvalidNameError: A key can't have this name.
        InvalidScopeError: There is no such scope.
    """
    unknown = [scope for scope in scopes if scope not in list(Scope)]
    if unknown:
        raise InvalidScopeError(f"there is no scope {unknown[0]!r}; write {', '.join(Scope)}")
    secret = PREFIX + secrets.token_urlsafe(32)
    try:
        key = ApiKey(name=name, sha256=hash_key(secret), scopes=tuple(map(Scope, scopes)))
    except ValidationError:
        raise InvalidNameError("it must be 1 to 64 letters, digits and '_.@-'") from None
    return report(key, secret)


def report(key: ApiKey, secret: str) -> str:
    """Return the text to print for a new key."""
    scopes = f"scopes: [{', '.join(key.scopes or Scope)}]"
    return (
        f"The key of {key.name!r}, shown only this once:\n"
        f"  {secret}\n"
        "Its entry in auth.api_keys_file, under `keys:`:\n"
        f"  - name: {key.name}\n"
        f"    sha256: {key.sha256}\n"
        f"    {'' if key.scopes else '# '}{scopes}\n"
        "    # requests_per_minute: 60\n"
        "    # tokens_per_minute: 100000\n"
        "    # max_concurrent_streams: 8\n"
        "    # weight: 1\n"
        "    # priority: 0\n"
        "    # best_priority: 0\n"
        f"Or, without limits and scopes, for {ENVIRONMENT_VARIABLE}:\n"
        f"  {key.name}:{key.sha256}\n"
    )
