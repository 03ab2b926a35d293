"""locust: a user who streams chat completions, for a few requests."""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import BASE_URL, MODEL, QUESTION, run

LOCUSTFILE = f'''\
from locust import HttpUser, constant, task
from locust.exception import StopUser


class Reader(HttpUser):
    wait_time = constant(0)

    def on_start(self):
        self.left = 3

    @task
    def chat(self):
        if self.left == 0:
            raise StopUser
        self.left -= 1
        body = {{
            "model": "{MODEL}",
            "messages": [{{"role": "user", "content": "{QUESTION}"}}],
            "stream": True,
        }}
        with self.client.post(
            "/chat/completions", json=body, stream=True, catch_response=True
        ) as response:
            lines = [line for line in response.iter_lines() if line]
            if lines[-1] != b"data: [DONE]":
                response.failure("cut")
'''


def load() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "locustfile.py").write_text(LOCUSTFILE)
    locust = Path(sys.executable).parent / "locust"
    options = ["--headless", "--users", "2", "--spawn-rate", "2", "--run-time", "20s"]
    options += ["--host", BASE_URL, "--csv", "run", "--only-summary"]
    done = subprocess.run(
        [locust, *options], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    with (folder / "run_stats.csv").open() as file:
        total = list(csv.DictReader(file))[-1]
    assert total["Failure Count"] == "0", total
    assert int(total["Request Count"]) == 6, total


run(globals())
