"""The example of retrieval in docs/clients.md, with the embedded models."""

import subprocess
import sys

from tests.clients_page import code_of
from tests.ray.serve_run import ROOT, Server

DEADLINE_S = 180


def test_the_example_finds_the_entry_and_explains_it(server: Server) -> None:
    code = code_of("Retrieval with openai's embeddings", "python", server.url)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert run.returncode == 0, run.stderr[-3000:]
    context, answer = run.stdout.rsplit("\n\n", maxsplit=1)
    assert "os.path.join" in context
    assert "path" in answer
