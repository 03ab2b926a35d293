import pytest

from loadtest.config.values import seconds_of
from tests.offenders import every

DURATIONS: list[tuple[object, float]] = [
    ("60s", 60),
    ("2m", 120),
    ("500ms", 0.5),
    ("1h30m", 5400),
    ("1.5s", 1.5),
    ("7", 7),
    (7, 7),
]


def test_durations_are_parsed_as_people_write_them() -> None:
    for case in every(DURATIONS):
        with case as (text, seconds):
            assert seconds_of(text) == pytest.approx(seconds)


def test_an_invalid_duration_is_refused() -> None:
    for case in every(("", "soon", "60 parsecs", "s", "1s1")):
        with case as text, pytest.raises(ValueError, match="not a duration such as 60s"):
            seconds_of(text)
