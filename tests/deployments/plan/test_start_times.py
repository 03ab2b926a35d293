"""The times of models' last starts, from a replica to `raystream plan`."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.plan import start_times
from deployments.plan.start_times import last_start_s, last_wake_s, note_start, note_wake
from tests.deployments.tiny_folder import spec


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_last_start_of_each_model_is_kept() -> None:
    one, other = spec("one"), spec("other")
    assert last_start_s(one) is None
    for total_s in (9.5, 7.25):
        note_start(one, total_s)
    note_start(other, 3.0)
    assert (last_start_s(one), last_start_s(other)) == (7.25, 3.0)


def test_wakes_are_kept_beside_starts() -> None:
    note_start(spec("m"), 7.0)
    assert last_wake_s(spec("m")) is None
    note_wake(spec("m"), 0.5)
    note_wake(spec("m"), 0.4)
    assert (last_start_s(spec("m")), last_wake_s(spec("m"))) == (7.0, 0.4)


@pytest.mark.parametrize(
    "changes", [{"quantization": "int8"}, {"revision": "a" * 40}, {"device": "auto"}]
)
def test_a_model_that_is_loaded_otherwise_is_another_one(changes: dict[str, str]) -> None:
    note_start(spec("m"), 7.0)
    assert last_start_s(spec("m", **changes)) is None


def test_limits_make_no_other_model() -> None:
    note_start(spec("m"), 7.0)
    assert last_start_s(spec("m", id="renamed", max_num_seqs=2)) == 7.0


def test_only_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(start_times, "MAX_MODELS", 3)
    specs = [spec(f"m{number}") for number in range(5)]
    for number, each in enumerate(specs):
        note_start(each, 1.0 + number)
        for path in (cache / "raystream" / "starts").iterdir():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))  # as if a second had passed
    assert [last_start_s(each) for each in specs] == [None, None, 3.0, 4.0, 5.0]


def test_the_files_are_closed_to_others(cache: Path) -> None:
    note_start(spec("m"), 7.0)
    folder = cache / "raystream" / "starts"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize(
    "content",
    [
        "", "no json", "[]", "7", "{}", '{"total_s": "7"}', '{"total_s": true}', '{"total_s": -1}',
        '{"total_s": Infinity}', '{"total_s": NaN}',
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_tells_nothing(cache: Path, content: str) -> None:
    note_start(spec("m"), 7.0)
    (path,) = (cache / "raystream" / "starts").iterdir()
    path.write_text(content)
    assert last_start_s(spec("m")) is None


def without_home(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", home)


def with_a_file_in_the_way(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (cache / "raystream").write_text("")


@pytest.mark.parametrize("harm", [without_home, with_a_file_in_the_way])
def test_a_start_goes_on_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    caplog.set_level("INFO")
    harm(monkeypatch, cache)
    note_start(spec("m"), 7.0)
    assert "the time is not kept among the starts" in caplog.text
    assert last_start_s(spec("m")) is None
