from pathlib import Path

import pytest

from loadtest.config.config_file import ConfigFileError, read_config_file
from loadtest.config.run_config import RunConfig
from tests.offenders import for_each

OLDER = """
pressure:
  target-url: http://127.0.0.1:8000/text-generation
  data-filename: questions.json
  mode: {mode}
  limit: 8
  interval: 0.5
  num-queues: 4
  num-threads: 2
  num-tasks: 10
  duration: 60
  num-users: 50
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yml"
    path.write_text(text)
    return path


def test_flag_names_may_have_hyphens_or_underscores(tmp_path: Path) -> None:
    path = written(tmp_path, "max-tokens: 5\nmax_inflight: 3\nqueues: [1, 2]\n")
    assert read_config_file(path).settings == {"max_tokens": 5, "max_inflight": 3, "queues": [1, 2]}


@pytest.mark.parametrize("mode", ["count", "duration"])
def test_an_older_file_is_understood(tmp_path: Path, mode: str) -> None:
    read = read_config_file(written(tmp_path, OLDER.replace("{mode}", mode)))
    config = RunConfig.model_validate(read.settings)
    assert config.url == "http://127.0.0.1:8000/text-generation"
    assert config.data == Path("questions.json")
    assert config.queues == (4,)
    assert config.users == 50
    assert config.interval == 0.5
    assert config.max_inflight == 8
    limits = (config.loops, config.duration)
    assert limits == ((10, None) if mode == "count" else (None, 60))
    assert "num-threads is ignored" in read.notices[0]


def test_an_older_key_may_be_dotted_and_the_newer_name_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "pressure.num-queues: 4\npressure.num-users: 9\nqueues: 7\n")
    assert read_config_file(path).settings == {"queues": 7, "users": 9}


@for_each(
    ("- 1", "must hold a mapping"),
    ("a: [", "run.yml"),
    ("pressure: {num-queue: 3}", "pressure has no key 'num-queue'; its keys are target-url"),
    ("pressure: [1]", "pressure must hold a mapping"),
    ("pressure: {mode: duration, num-tasks: 3}", "pressure.duration is missing"),
    ("pressure: {mode: fast}", "mode must be one of count, duration, not 'fast'"),
)
def test_an_invalid_file_is_refused_with_its_fault(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=said):
        read_config_file(written(tmp_path, text))


def test_a_file_with_only_a_duration_needs_no_mode(tmp_path: Path) -> None:
    path = written(tmp_path, "pressure: {duration: 60}")
    assert read_config_file(path).settings == {"duration": 60}
