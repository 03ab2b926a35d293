"""The example of retrieval in docs/clients.md, with the embedded models."""

import pytest

from tests.clients.snippet import run_snippet
from tests.engines import only_raystream
from tests.ray.serve_run import ROOT
from tests.serve_app.local_server import LocalServer


@only_raystream("it asks models that embed; VllmPooler has tests of its own")
@pytest.mark.slow
def test_the_example_finds_the_entry_and_explains_it(
    local: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run_snippet("Retrieval with openai's embeddings", local)
    context, answer = capsys.readouterr().out.rsplit("\n\n", maxsplit=1)
    assert "os.path.join" in context
    assert "path" in answer
