from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from serve_app.config import ApiKey, AuthConfig
from serve_app.keys.api_keys import ApiKeysError, KeyRing, hash_key, load_api_keys
from tests.offenders import for_each

SECRET = "sk-raystream-of-alice"
OTHER = "sk-raystream-of-bob"


def write(path: Path, *keys: dict[str, object]) -> AuthConfig:
    path.write_text(yaml.safe_dump({"keys": list(keys)}))
    return AuthConfig(api_keys_file=str(path))


def entry(name: str, secret: str, **limits: object) -> dict[str, object]:
    return {"name": name, "sha256": sha256(secret.encode()).hexdigest(), **limits}


def test_keys_of_the_file_are_found_by_their_hashes(tmp_path: Path) -> None:
    config = write(tmp_path / "k", entry("alice", SECRET, tokens_per_minute=5), entry("bob", OTHER))
    ring = load_api_keys(config, tmp_path, {})
    assert ring is not None
    alice, bob = ring.find(SECRET), ring.find(OTHER)
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.tokens_per_minute, bob.name) == ("alice", 5, "bob")
    assert ring.limited == (alice,)


def test_a_key_has_a_share_and_bounds_the_priority(tmp_path: Path) -> None:
    given = {"weight": 2.5, "priority": 3, "best_priority": -1}
    ring = load_api_keys(write(tmp_path / "k", entry("alice", SECRET, **given)), tmp_path, {})
    assert ring is not None
    alice = ring.find(SECRET)
    assert alice is not None
    assert (alice.weight, alice.priority, alice.best_priority) == (2.5, 3, -1)
    assert not alice.is_limited


@for_each(
    ({"weight": 0}, "weight"),
    ({"weight": float("nan")}, "weight"),
    ({"priority": 0.5}, "priority"),
    ({"priority": 2**31}, "priority"),
    ({"best_priority": 1}, "lower runs first, so it must not be more than priority"),
    ({"priority": -5, "best_priority": -4}, "lower runs first"),
)
def test_a_wrong_share_or_priority_is_refused(
    given: dict[str, object], told: str, tmp_path: Path
) -> None:
    config = write(tmp_path / "k", entry("alice", SECRET, **given))
    with pytest.raises(ApiKeysError, match=told):
        load_api_keys(config, tmp_path, {})


@for_each("", SECRET[:-1], SECRET + " ", hash_key(SECRET), "\udc80")
def test_no_other_key_is_found(presented: str) -> None:
    assert KeyRing((ApiKey(name="a", sha256=hash_key(SECRET)),)).find(presented) is None


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(one: str, other: str) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("serve_app.keys.api_keys.hmac.compare_digest", compare)
    keys = tuple(ApiKey(name=f"k{i}", sha256=hash_key(f"secret {i}")) for i in range(5))
    found = KeyRing(keys).find("secret 0")
    assert found is keys[0]
    assert compared == [key.sha256 for key in keys]


def test_no_source_means_no_keys(tmp_path: Path) -> None:
    assert load_api_keys(AuthConfig(), tmp_path, {}) is None
    assert load_api_keys(AuthConfig(), tmp_path, {"RAYSTREAM_API_KEYS": " "}) is None


def test_a_relative_file_is_found_in_the_project(tmp_path: Path) -> None:
    write(tmp_path / "keys.yaml", entry("alice", SECRET))
    ring = load_api_keys(AuthConfig(api_keys_file="keys.yaml"), tmp_path, {})
    assert ring is not None
    assert ring.find(SECRET) is not None


def test_environment_holds_pairs(tmp_path: Path) -> None:
    text = f"alice:{hash_key(SECRET)}, bob:{hash_key(OTHER)}"
    ring = load_api_keys(AuthConfig(), tmp_path, {"RAYSTREAM_API_KEYS": text})
    assert ring is not None
    assert [key.name for key in ring.keys] == ["alice", "bob"]
    assert ring.limited == ()


def test_environment_may_hold_one_plain_key(tmp_path: Path) -> None:
    ring = load_api_keys(AuthConfig(), tmp_path, {"RAYSTREAM_API_KEYS": SECRET})
    assert ring is not None
    assert ring.find(SECRET) == ApiKey(name="default", sha256=hash_key(SECRET))


def test_file_and_environment_may_both_hold_keys(tmp_path: Path) -> None:
    config = write(tmp_path / "k", entry("alice", SECRET))
    ring = load_api_keys(config, tmp_path, {"RAYSTREAM_API_KEYS": f"bob:{hash_key(OTHER)}"})
    assert ring is not None
    assert len(ring.keys) == 2


def test_a_key_of_both_is_the_one_of_the_file(tmp_path: Path) -> None:
    config = write(tmp_path / "k", entry("alice", SECRET, scopes=["operate"]))
    ring = load_api_keys(config, tmp_path, {"RAYSTREAM_API_KEYS": f"alice:{hash_key(SECRET)}"})
    assert ring is not None
    assert [(key.name, key.scopes) for key in ring.keys] == [("alice", ("operate",))]


@for_each("short", f"alice:{SECRET}", f"{SECRET},{OTHER}", "a:b,c:d")
def test_environment_that_holds_anything_else_is_refused_without_an_echo(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(ApiKeysError, match="name:sha256") as caught:
        load_api_keys(AuthConfig(), tmp_path, {"RAYSTREAM_API_KEYS": text})
    assert text not in str(caught.value)


@for_each(
    ("keys: []", "keys"),
    ("", "the file"),
    ("keys: [", "not YAML"),
    ("keys:\n- name: a\n  name: b\n", "not YAML"),
    ("keys:\n- name: a\n", "sha256"),
    (f"keys:\n- name: a\n  sha256: {SECRET}\n", "sha256"),
    (f"keys:\n- name: a b\n  sha256: {'a' * 64}\n", "name"),
    (f"keys:\n- name: a\n  sha256: {'0' * 64}\n  request_per_minute: 1\n", "did you mean"),
    (f"keys:\n- name: a\n  sha256: {'a' * 64}\n  requests_per_minute: 0\n", "requests_per"),
    (f"keys:\n- name: a\n  sha256: {'a' * 64}\n  scopes: operate\n", r"list: \[operate\]"),
    (f"keys:\n- name: a\n  sha256: {'a' * 64}\n  scopes: [admin]\n", "scopes.0: .*'operate'"),
)
def test_a_broken_file_is_refused_without_an_echo(
    content: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ApiKeysError, match=expected) as caught:
        load_api_keys(AuthConfig(api_keys_file=str(path)), tmp_path, {})
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match=r"api_keys_file: nowhere\.yaml: No such file"):
        load_api_keys(AuthConfig(api_keys_file="nowhere.yaml"), tmp_path, {})


@pytest.mark.parametrize(
    "second", [entry("alice", OTHER), entry("bob", SECRET)], ids=["name", "key"]
)
def test_a_duplicate_name_or_key_is_refused(tmp_path: Path, second: dict[str, object]) -> None:
    config = write(tmp_path / "k", entry("alice", SECRET), second)
    with pytest.raises(ApiKeysError, match="API keys"):
        load_api_keys(config, tmp_path, {})


def test_keys_of_the_environment_contradict_allow_anonymous(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match="contradict"):
        load_api_keys(AuthConfig(allow_anonymous=True), tmp_path, {"RAYSTREAM_API_KEYS": SECRET})
