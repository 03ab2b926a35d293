import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_a_marked_asynchronous_test_that_waits_forever_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(
        "from tests import deadline\n"
        "from tests.conftest import pytest_collection_modifyitems\n"
        "deadline.DEADLINE_S = 0.1\n"
    )
    pytester.makeini("[pytest]\nmarkers = in_time\nasyncio_mode = auto\n")
    pytester.makepyfile(
        textwrap.dedent(
            """
            import asyncio
            import pytest
            from tests.stopped_clock import stop_clock

            @pytest.mark.in_time
            async def test_waits():
                await asyncio.wait_for(asyncio.Event().wait(), 20)

            @pytest.mark.in_time
            async def test_waits_while_the_clock_stands(monkeypatch):
                stop_clock(monkeypatch)
                await asyncio.Event().wait()

            @pytest.mark.in_time
            async def test_ends():
                await asyncio.sleep(0)

            async def test_unmarked():
                await asyncio.sleep(0.2)
            """
        )
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n0")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*in limited*", "E *TimeoutError"])
