"""API keys: which ones let requests in, and the limits, shares and scopes of each.

This module reads the keys and finds the one that a request presents. Only the SHA-256 of a key is
kept. Keys are random and long, so a slow hash would add no protection, and cost every request time.

The file (`auth.api_keys_file`) is YAML; `raystream new-key NAME` prints each entry:

    keys:
      - name: alice
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        requests_per_minute: 60     # each of these three may be left out: no limit
        tokens_per_minute: 100000
        max_concurrent_streams: 8
        weight: 2                   # its share of a busy model beside the others'; 1 if left out
        priority: 0                 # of requests that name none; lower runs first
        best_priority: 0            # the best that a request may name; as `priority` if left out
        scopes: [operate]           # may use routes that show what all users do

The environment variable RAYSTREAM_API_KEYS holds `name:sha256` pairs, separated by commas, or one
plain key, whose name is then "default". Keys from the environment have neither limits nor
scopes, and the weight 1.
"""

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import yaml
from pydantic import Field, ValidationError

from deployments.contract.strict_model import StrictModel
from serve_app.config import ApiKey, AuthConfig
from serve_app.strict_yaml import UniqueKeyLoader

ENVIRONMENT_VARIABLE: Final = "RAYSTREAM_API_KEYS"
DEFAULT_NAME: Final = "default"
MIN_PLAIN_LENGTH: Final = 16

PLAIN_RULE: Final = (
    f"{MIN_PLAIN_LENGTH} to 256 letters, digits and signs, without spaces, commas and colons"
)
"""What a key of one's own choice must be."""

_PAIR = re.compile(r"([A-Za-z0-9_.@-]{1,64}):([0-9a-f]{64})")
_PLAIN = re.compile(
    rf"[\x21-\x2b\x2d-\x39\x3b-\x7e]{{{MIN_PLAIN_LENGTH},256}}"
)  # no comma, no colon


class ApiKeysError(ValueError):
    """The keys can't be read. The message says why and never repeats a key."""


class _ApiKeysFile(StrictModel):
    keys: tuple[ApiKey, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All known keys. It is pickled on its way to the ingress's replicas."""

    keys: tuple[ApiKey, ...]

    def find(self, presented: str) -> ApiKey | None:
        """Return the known key that equals the presented one, if there is one.

        Every key is compared, whether or not one has matched, so that the time reveals nothing.
        """
        digest = hash_key(presented)
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return found

    @property
    def limited(self) -> tuple[ApiKey, ...]:
        """The keys that have limits."""
        return tuple(key for key in self.keys if key.is_limited)


def hash_key(key: str) -> str:
    """Return a key's SHA-256 in hexadecimal, the only form in which keys are kept."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def is_plain(key: str) -> bool:
    """Return whether a key of one's own choice is one; see `PLAIN_RULE`."""
    return _PLAIN.fullmatch(key) is not None


def load_api_keys(config: AuthConfig, root: Path, environment: Mapping[str, str]) -> KeyRing | None:
    """Return the keys of the configuration, its file and the environment; None if there are none.

    Args:
        config: Has keys, and names the file.
        root: Where to look for the file if its path is relative and the working directory has no
            such file.
        environment: May hold RAYSTREAM_API_KEYS.

    Raises:
        ApiKeysError: A configured source can't be read, or the sources contradict each other.
    """
    keys = list(config.api_keys)
    if config.api_keys_file is not None:
        here = Path(config.api_keys_file)
        there = root / here
        keys += read_file(there if there.exists() and not here.exists() else here)
    if text := environment.get(ENVIRONMENT_VARIABLE, "").strip():
        if config.allow_anonymous:
            raise ApiKeysError(
                f"{ENVIRONMENT_VARIABLE} and auth.allow_anonymous: true contradict each other; "
                "unset one of them"
            )
        # A file that `raystream serve --save` wrote has the keys that the environment had.
        known = {(key.name, key.sha256) for key in keys}
        keys += [key for key in read_environment(text) if (key.name, key.sha256) not in known]
    _require_distinct(keys)
    return KeyRing(tuple(keys)) if keys else None


def read_file(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file.

    Raises:
        ApiKeysError: There is no such file, or it holds something other than keys.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
        return _ApiKeysFile.model_validate(document).keys
    except OSError as error:
        raise ApiKeysError(f"auth.api_keys_file: {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ApiKeysError(f"auth.api_keys_file: {path} is not YAML") from None
    except ValidationError as error:
        # The values are left out: the file may hold a key where its hash belongs.
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ApiKeysError(f"auth.api_keys_file: {path}: {where}: {first['msg']}") from None


def read_environment(text: str) -> tuple[ApiKey, ...]:
    """Return the keys in the value of RAYSTREAM_API_KEYS.

    Raises:
        ApiKeysError: It holds neither pairs nor one plain key.
    """
    if is_plain(text):
        return (ApiKey(name=DEFAULT_NAME, sha256=hash_key(text)),)
    pairs = [_PAIR.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise ApiKeysError(
            f"{ENVIRONMENT_VARIABLE}: write name:sha256 pairs separated by commas, as "
            f"`raystream new-key NAME` prints them, or one plain key: {PLAIN_RULE}"
        )
    return tuple(ApiKey(name=pair[1], sha256=pair[2]) for pair in pairs if pair)


def _require_distinct(keys: Iterable[ApiKey]) -> None:
    names, digests = set[str](), set[str]()
    for key in keys:
        if key.name in names:
            raise ApiKeysError(f"API keys: the name {key.name!r} is used twice")
        if key.sha256 in digests:
            raise ApiKeysError(f"API keys: {key.name!r} has the same key as another name")
        names.add(key.name)
        digests.add(key.sha256)
