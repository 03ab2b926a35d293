import subprocess
import sys

import pytest

from serve_app.ingress_replica import announce

CHECK = """
import sys
import serve_app.ingress_replica
found = [name for name in ("torch", "transformers") if name in sys.modules]
sys.exit(", ".join(found) or None)
"""


@pytest.mark.slow
def test_the_ingress_imports_neither_torch_nor_transformers() -> None:
    found = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


class FakeAnnouncement:
    """A server that is ready when it has been asked as often as this."""

    def __init__(self, num_questions: int) -> None:
        self.num_left = num_questions

    def is_ready(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0

    def text(self, after_s: float) -> str:
        return "raystream is ready"


@pytest.mark.parametrize(("num_questions", "lines"), [(3, ["raystream is ready"]), (1, [])])
async def test_only_an_ingress_that_starts_before_the_server_is_ready_says_that_it_is(
    num_questions: int, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ray.serve.raystream")
    announcement = FakeAnnouncement(num_questions)
    await announce(announcement, poll_s=0)
    assert announcement.num_left == 0
    assert [record.getMessage() for record in caplog.records] == lines
