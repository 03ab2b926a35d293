"""The page's modules that need no browser, in Node."""

import subprocess

from tests.serve_app.playground.node_program import MODULES, NODE


def test_the_modules_of_the_page_do_as_their_own_tests_say() -> None:
    tests = sorted(map(str, MODULES.glob("*.test.mjs")))
    assert tests
    run = subprocess.run([NODE, "--test", *tests], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
