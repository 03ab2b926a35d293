"""Values that tests measure: written down by each test, and printed after all of them."""

from collections.abc import Callable

import pytest

Record = Callable[[str, object], None]
"""Tells a measured value."""


@pytest.fixture
def record(record_property: Record) -> Record:
    """Write down a measured value, as text: xdist's workers can't send objects of any class."""
    return lambda name, value: record_property(name, str(value))


def show_measured(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have measured."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    measured = [report for report in reports if report.when == "call" and report.user_properties]
    if measured:
        terminalreporter.section("measured")
    for report in measured:
        terminalreporter.line(report.nodeid.partition("::")[2])
        for name, value in report.user_properties:
            terminalreporter.line(f"    {name}: {value}")
