import pytest

from loadtest.config.values import seconds_of
from tests.offenders import for_each


@for_each(
    ("60s", 60), ("2m", 120), ("500ms", 0.5), ("1h30m", 5400), ("1.5s", 1.5), ("7", 7), (7, 7)
)
def test_durations_are_parsed_as_people_write_them(text: object, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@for_each("", "soon", "60 parsecs", "s", "1s1")
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration such as 60s"):
        seconds_of(text)
