"""Each client's script and its snippet in docs/clients.md, against the server that users start.

Minutes long, since each client gets an environment of its own; see `environments`.
"""

import pytest

from tests.changing_server import ChangingServer
from tests.clients.real.environments import CLIENTS
from tests.clients.real.record import read, run_script
from tests.clients.real.snippets import run_snippet, snippets
from tests.clients.served.conftest import config
from tests.clients.served_models import long_model
from tests.ray.serve_run import Server

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(changing_server: ChangingServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Serve the model for long prompts, too."""
    document = config()
    models = document["applications"][0]["args"]["models"]
    models.append(long_model(tmp_path_factory.mktemp("models")))
    return changing_server.serve(document)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_step_of_a_client_s_script_succeeds(server: Server, client: str) -> None:
    run = run_script(client, server.url)
    failed = {step: failure for step, failure in run.failures.items() if failure}
    assert not failed, "\n".join(f"{step}\n{failure}" for step, failure in failed.items())
    recorded = {(request.method, request.path, request.step) for request in read(client)}
    sent = {(request.method, request.path, request.step) for request in run.requests}
    assert recorded <= sent, "record again: python -m tests.clients.real.record"


@pytest.mark.parametrize("client", sorted(snippets()))
def test_a_client_s_snippet_in_the_documentation_runs(server: Server, client: str) -> None:
    done = run_snippet(client, server.url)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (done.stdout + done.stderr).strip()
