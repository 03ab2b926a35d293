import re

import pytest

from deployments.replica import start_phases
from deployments.replica.start_phases import StartPhases


def test_phases_follow_each_other() -> None:
    times = iter([3.0, 7.5])
    phases = StartPhases(1.0, lambda: next(times))
    phases.end("process", 1.5)
    phases.end("imports")
    phases.end("weights")
    assert str(phases) == "process 0.5, imports 1.5, weights 4.5"
    assert phases.total_s == 6.5


@pytest.mark.parametrize("max_process_s", [1e9, -1.0])
def test_the_age_of_a_process_counts_unless_it_has_waited(
    monkeypatch: pytest.MonkeyPatch, max_process_s: float
) -> None:
    monkeypatch.setattr(start_phases, "MAX_PROCESS_S", max_process_s)
    names = re.findall("[a-z]+", str(StartPhases.of_process()))
    assert names == (["process", "imports"] if max_process_s > 0 else ["imports"])
