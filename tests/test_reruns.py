from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = """
import pathlib
import pytest

def fails_at_first(name, num_failures):
    tries = pathlib.Path(name)
    number = len(tries.read_text()) if tries.exists() else 0
    tries.write_text("x" * (number + 1))
    assert number >= num_failures, f"{name} was starved"

@pytest.fixture
def server():
    fails_at_first("server", 1)
"""
ONCE = "@pytest.mark.ray\ndef test_once(): fails_at_first('once', 1)\n"
SETUP = "@pytest.mark.ray\ndef test_setup(server): pass\n"
TWICE = "@pytest.mark.browser\ndef test_twice(): fails_at_first('twice', 2)\n"
IN_PROCESS = "def test_in_process(): fails_at_first('in process', 1)\n"
IN_TIME = "@pytest.mark.in_time\ndef test_in_time(): fails_at_first('in time', 1)\n"
PASSES = "def test_passes(): pass\n"

pytestmark = pytest.mark.slow


def run(pytester: pytest.Pytester, *tests: str, processes: int = 0) -> pytest.RunResult:
    pytester.makepyfile(test_module="".join([MODULE, PASSES, *tests]))
    marks = "ray\n    browser\n    in_time"
    pytester.makeini(f"[pytest]\nmarkers = {marks}\naddopts = -p tests.reruns -p xdist\n")
    return pytester.runpytest_subprocess(f"-n{processes}", "--rerun-starved")


@pytest.fixture(autouse=True)
def _only_our_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize("processes", [0, 1])
def test_one_that_then_passes_is_no_failure_but_is_shown_with_its_first_one(
    pytester: pytest.Pytester, processes: int
) -> None:
    result = run(pytester, ONCE, SETUP, IN_TIME, processes=processes)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "runs again, alone: test_module.py::test_once",
            "*tests that ran again*",
            "passed: test_module.py::test_once (first: AssertionError: once was starved)",
            "passed: test_module.py::test_in_time (first: AssertionError: in time was starved)",
            "passed: test_module.py::test_setup (first: AssertionError: server was starved)",
            "*1 passed, 3 rerun in*",
        ]
    )


def test_one_that_fails_twice_is_a_failure(pytester: pytest.Pytester) -> None:
    result = run(pytester, ONCE, TWICE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED again: test_module.py::test_twice (first: AssertionError: twice was starved)"]
    )
    result.stdout.fnmatch_lines(["*1 failed, 1 passed, 1 rerun in*"])


def test_what_one_that_failed_has_left_open_fails_no_other(pytester: pytest.Pytester) -> None:
    leaves = """
import gc, socket
@pytest.mark.ray
def test_leaves():
    left = [socket.socket()]
    left.append(left)
    fails_at_first('leaves', 1)
    left[0].close()
"""
    collects = '@pytest.mark.filterwarnings("error")\ndef test_collects(): gc.collect()\n'
    result = run(pytester, leaves, collects)
    result.stdout.fnmatch_lines(["*2 passed, 1 rerun in*"])


def test_one_in_process_is_never_run_again(pytester: pytest.Pytester) -> None:
    result = run(pytester, ONCE, IN_PROCESS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (pytester.path / "in process").read_text() == "x"
    result.stdout.fnmatch_lines(["*1 failed, 1 passed, 1 rerun in*"])


def test_the_second_try_has_the_plugins_and_filters_of_the_first(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        plugin="import pytest\n@pytest.fixture\ndef of_plugin():\n    return 1\n",
        test_module=f"""{MODULE}
@pytest.mark.vllm
def test_once(of_plugin):
    import warnings
    warnings.warn("filtered")
    fails_at_first("once", 1)
""",
    )
    pytester.makeini("[pytest]\nmarkers = vllm\nfilterwarnings = error\n")
    options = ("-ptests.reruns", "-pplugin", "-Wignore", f"--confcutdir={pytester.path}")
    result = pytester.runpytest_subprocess(*options, "--rerun-starved")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*1 rerun in*"])


def test_tests_that_failed_with_what_they_share_run_again_together(
    pytester: pytest.Pytester,
) -> None:
    shared = """
@pytest.fixture(scope="module")
def engine():
    fails_at_first("engine", 1)

@pytest.mark.ray
@pytest.mark.parametrize("number", range(20))
def test_shared(engine, number): pass
"""
    result = run(pytester, shared, TWICE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (pytester.path / "engine").read_text() == "xx"
    result.stdout.fnmatch_lines(["*1 failed, 1 passed, 20 rerun in*"])


def test_a_second_try_that_does_not_end_whole_is_a_failure(pytester: pytest.Pytester) -> None:
    ends = (
        "@pytest.mark.ray\ndef test_ends():\n    fails_at_first('end', 1)\n    pytest.exit('end')\n"
    )
    result = run(pytester, ONCE, ends)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*2 failed, 1 passed in*"])


def test_failures_in_many_files_are_not_run_again(pytester: pytest.Pytester) -> None:
    for number in range(9):
        test = ONCE.replace("once", f"once_{number}")
        pytester.makepyfile(**{f"test_{number}": MODULE + test})
    result = run(pytester)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=9, passed=1)
