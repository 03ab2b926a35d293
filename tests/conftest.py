import gc
import os
import sys
from collections.abc import Iterator
from inspect import iscoroutinefunction

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.changing_server import changing_server
from tests.deadline import in_time
from tests.engines import engine_name
from tests.measured import record, show_measured
from tests.programs import need_programs, show_missing
from tests.stopped_clock import Clock, stop_clock

__all__ = ["changing_server", "engine_name", "record"]

pytest_plugins = ("pytester", "tests.reruns")

# The models in the tests are so small that a second thread only waits for the first.
torch.set_num_threads(1)

# How long an example takes, and to draw it, is the machine's business; what it gives is ours.
settings.register_profile("raystream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A run of CI must fail for what the commit has changed, not for the luck of the draw.
# The same examples each time find little more when they are many.
settings.register_profile(
    "raystream-ci", settings.get_profile("raystream"), derandomize=True, max_examples=40
)
settings.load_profile("raystream")

SERVING = (
    "tests/ray/",
    "tests/k8s/live/",
    "tests/faults/served/",
    "tests/scaling/",
    "tests/clients/served/",
)
"""Folders whose tests mostly wait for a Ray, in their order: the last three share a server."""
MARKS = {
    "tests/clients/served/": (pytest.mark.ray,),
    "tests/faults/served/": (pytest.mark.ray, pytest.mark.slow),
    "tests/scaling/": (pytest.mark.ray, pytest.mark.slow),
    "tests/serve_app/playground/test_browser_": (pytest.mark.browser, pytest.mark.slow),
}
"""Marks of all tests whose names begin so."""
RAY_NICENESS = 5
OTHERS_NICENESS = 10
"""What Ray's workers, and each process of pytest from its first test without a Ray on, add to their
niceness. Beside others on the same core, a replica that starts then has three quarters of it.
"""
HAS_GIVEN_WAY = pytest.StashKey[bool]()
"""Whether this process of pytest has added to its niceness."""
HAD_RAY = pytest.StashKey[bool]()
"""Whether a Ray ran in this process before the test."""

LOADING = ("tests/clients/",)
"""Folders whose tests share models that take seconds to load; they, too, stay in one process."""


def pytest_configure(config: pytest.Config) -> None:
    """Let CI draw the same examples in each run, but for the soak tests; set Ray's niceness."""
    os.environ["RAY_worker_niceness"] = str(RAY_NICENESS)  # noqa: SIM112 - Ray's own spelling
    if "CI" in os.environ and not config.getoption("markexpr").startswith("soak"):
        settings.load_profile("raystream-ci")


class ServingApart(LoadFileScheduling):  # type: ignore[misc] # xdist ships no types
    """Gives each process whole files, and all tests that need a Ray to the same process.

    Two Rays at once would starve each other on two cores. The tests of one wait most of the time,
    so the other processes compute meanwhile; they give way to it (`give_way`).
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SERVING):
            return "serving"
        shared = next((folder for folder in LOADING if nodeid.startswith(folder)), None)
        return shared or super()._split_scope(nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: the tests that need a Ray; bound those that ask for it.

    Also mark what stands in `MARKS`.
    """
    for item in items:
        for start, marks in MARKS.items():
            if item.nodeid.startswith(start):
                for mark in marks:
                    item.add_marker(mark)
    functions = (item for item in items if isinstance(item, pytest.Function))
    for function in functions:
        if function.get_closest_marker("in_time") and iscoroutinefunction(function.obj):
            function.obj = in_time(function.obj)
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in SERVING])


def pytest_collection_finish() -> None:
    """Keep what lives until the end from the collector, which would traverse it each time."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ServingApart:
    return ServingApart(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.nodeid.startswith(SERVING):
        give_way(item.config)
    need_programs(item)
    item.stash[HAD_RAY] = has_ray()


def give_way(config: pytest.Config) -> None:
    """Let the Ray of another process of pytest go first, from now on."""
    is_one_of_several = hasattr(config, "workerinput")
    if is_one_of_several and not config.stash.get(HAS_GIVEN_WAY, False):
        config.stash[HAS_GIVEN_WAY] = True
        os.nice(OTHERS_NICENESS)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test that leaves a Ray in this process: later tests would find themselves in it.

    Many functions of Ray and Serve start one when there is none.
    """
    is_started = has_ray() and not item.stash.get(HAD_RAY, False)
    assert not is_started or item.get_closest_marker("ray"), "the test has left a Ray running"


def has_ray() -> bool:
    """Return whether this process is connected to a Ray."""
    ray = sys.modules.get("ray")  # absent in the environment of another engine
    return ray is not None and bool(ray.is_initialized())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    show_measured(terminalreporter)
    show_missing(terminalreporter)


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stop the event loop's clock; return a function that advances it."""
    return stop_clock(monkeypatch)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads that torch computes with."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
